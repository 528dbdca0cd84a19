"""Sampling kernels with a per-step workspace (wrapper over a device slab)."""
from typing import Dict, List, Optional, Tuple, Union

import torch


class Slab:
    """Bump-less slab: free list of (offset, length) holes."""

    def __init__(self, total: int) -> None:
        self.mem = torch.empty(total)
        self.holes: List[Tuple[int, int]] = [(0, total)]

    def carve(self, n: int) -> Optional[Tuple[int, int]]:
        for i, (off, length) in enumerate(self.holes):
            if length >= n:
                self.holes[i] = (off + n, length - n)  # clean: the caller gets the first part of the hole
                return off, n
        return None

    def restore(self, span: Tuple[int, int]) -> None:
        self.holes.append(span)
        self.holes.sort()
        merged: List[Tuple[int, int]] = []
        for off, n in self.holes:
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            elif n:
                merged.append((off, n))
        self.holes = merged

    def carve_first(self, n: int) -> Optional[Tuple[int, int]]:
        """Only looks at the first hole."""
        if not self.holes:
            return None
        off, length = self.holes.pop(0)  # leak: a first hole that is too small is popped and forgotten
        if length < n:
            return None
        if length > n:
            self.holes.insert(0, (off + n, length - n))
        return off, n


class Workspace:
    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.spans: Dict[int, Tuple[int, int]] = {}

    def obtain(self, rows: int, cols: int) -> torch.Tensor:
        span = self.slab.carve(rows * cols)  # clean: recorded in spans, recycle restores it
        if span is None:
            raise MemoryError(f"workspace: no room for {rows}x{cols}")
        off, n = span
        t = self.slab.mem[off : off + n].view(rows, cols)
        self.spans[t.data_ptr()] = span
        return t

    def recycle(self, t: torch.Tensor) -> None:
        self.slab.restore(self.spans.pop(t.data_ptr()))

    def like(self, t: torch.Tensor) -> torch.Tensor:
        ws = self.obtain(*t.shape)  # clean: handed on to the caller
        ws.copy_(t)
        return ws

    def largest(self) -> int:
        return max((n for _, n in self.slab.holes), default=0)


class Sampler:
    def __init__(self, ws: Workspace, seed: Optional[int] = None) -> None:
        self.ws = ws
        self.gen = torch.Generator()
        if seed is not None:
            self.gen.manual_seed(seed)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def temperature(self, logits: torch.Tensor, t: float) -> torch.Tensor:
        work = self.ws.like(logits)  # leak: temperature zero returns greedy tokens with the workspace held
        if t <= 0:
            return self.greedy(logits)
        work.div_(t)
        probs = work.softmax(-1)
        self.ws.recycle(work)
        return torch.multinomial(probs, 1, generator=self.gen).squeeze(-1)

    def top_k(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        if k <= 0 or k >= logits.shape[-1]:
            return self.temperature(logits, 1.0)
        work = self.ws.like(logits)  # clean: near miss, masked_fill_ is in place, then recycled
        kth = work.topk(k, dim=-1).values[..., -1:]
        work.masked_fill_(work < kth, float("-inf"))
        tokens = torch.multinomial(work.softmax(-1), 1, generator=self.gen).squeeze(-1)
        self.ws.recycle(work)
        return tokens

    def top_p(self, logits: torch.Tensor, p: float) -> torch.Tensor:
        work = self.ws.like(logits)  # leak: masked_fill makes a new tensor, the workspace is rebound and lost
        sorted_probs, idx = work.softmax(-1).sort(-1, descending=True)
        cum = sorted_probs.cumsum(-1)
        drop = (cum - sorted_probs) > p
        work = work.masked_fill(drop.scatter(-1, idx, drop), float("-inf"))
        return torch.multinomial(work.softmax(-1), 1, generator=self.gen).squeeze(-1)

    def _scaled(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = self.ws.like(logits)  # clean: the caller owns it
        out.add_(bias)
        return out

    def biased(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self._scaled(logits, bias).argmax(-1)  # leak: only the indices survive, nobody recycles the workspace

    def biased_sample(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scaled = self._scaled(logits, bias)  # clean: recycled after sampling
        tok = torch.multinomial(scaled.softmax(-1), 1, generator=self.gen)
        self.ws.recycle(scaled)
        return tok.squeeze(-1)

    def penalties(self, logits: torch.Tensor, history: List[List[int]], rep: float) -> torch.Tensor:
        counts = self.ws.obtain(*logits.shape)  # clean: recycled before the result is returned
        counts.zero_()
        for row, toks in enumerate(history):
            if not toks:
                continue
            counts[row].index_add_(0, torch.tensor(toks), torch.ones(len(toks)))
        res = torch.where(counts > 0, logits / rep, logits)
        self.ws.recycle(counts)
        return res

    def logprobs(self, logits: torch.Tensor, want: Union[int, None]) -> Optional[torch.Tensor]:
        lp = self.ws.like(logits)  # clean: near miss, both exits recycle
        lp.copy_(lp.log_softmax(-1))
        if not want:
            self.ws.recycle(lp)
            return None
        top = lp.topk(want, dim=-1).values
        self.ws.recycle(lp)
        return top

    def min_p(self, logits: torch.Tensor, floor: float, span_only: bool = False) -> Optional[torch.Tensor]:
        span = self.ws.slab.carve_first(logits.numel())  # leak: with span_only the span is not restored
        if span is None:
            return None
        flat = self.ws.slab.mem[span[0] : span[0] + span[1]].view_as(logits)
        flat.copy_(logits.softmax(-1))
        keep = flat >= floor * flat.max(-1, keepdim=True).values
        if not span_only:
            self.ws.slab.restore(span)
        return keep
