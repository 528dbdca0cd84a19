"""Sampler with reusable logits, mask and index buffers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

import torch

LogitsProcessor = Callable[[List[int], torch.Tensor], torch.Tensor]


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0


class BufferRing:
    """A fixed number of vocab-wide buffers used in turn."""

    def __init__(self, vocab: int, n: int) -> None:
        self.vocab = vocab
        self._bufs = [torch.empty(vocab) for _ in range(n)]
        self._taken = [False] * n

    def take(self) -> torch.Tensor:
        for i, used in enumerate(self._taken):
            if not used:
                self._taken[i] = True
                return self._bufs[i]
        raise MemoryError("sampling buffers in use")

    def put_back(self, buf: torch.Tensor) -> None:
        for i, b in enumerate(self._bufs):
            if b.data_ptr() == buf.data_ptr():
                self._taken[i] = False
                return
        raise ValueError("foreign buffer")


class Sampler:
    def __init__(self, ring: BufferRing) -> None:
        self.ring = ring
        self.processors: List[LogitsProcessor] = []
        self._bias: Optional[torch.Tensor] = None

    def sample(self, logits: torch.Tensor, p: SamplingParams) -> int:
        if p.temperature == 0.0:
            return int(logits.argmax())
        work = self.ring.take()  # clean: greedy returns before the take, here it is put back
        work.copy_(logits).div_(p.temperature)
        tok = int(torch.multinomial(work.softmax(-1), 1))
        self.ring.put_back(work)
        return tok

    def sample_greedy_mix(self, logits: torch.Tensor, p: SamplingParams) -> int:
        work = self.ring.take()  # leak: the greedy return comes after the take
        work.copy_(logits)
        if p.temperature == 0.0:
            return int(work.argmax())
        work.div_(p.temperature)
        tok = int(torch.multinomial(work.softmax(-1), 1))
        self.ring.put_back(work)
        return tok

    def top_k(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        work = self.ring.take()  # clean: near miss, masked_fill_ works in place and the buffer is put back
        work.copy_(logits)
        if k > 0:
            kth = work.topk(k).values[-1]
            work = work.masked_fill_(work < kth, float("-inf"))
        probs = work.softmax(-1)
        self.ring.put_back(work)
        return probs

    def top_p(self, logits: torch.Tensor, top_p: float) -> torch.Tensor:
        work = self.ring.take()  # leak: never put back, with top_p below one its name is lost as well
        work.copy_(logits)
        order = work.argsort(descending=True)
        cum = work.softmax(-1)[order].cumsum(-1)
        if top_p < 1.0:
            work = work.masked_fill(cum > top_p, float("-inf"))
        return work.softmax(-1)

    def penalize(self, logits: torch.Tensor, history: List[int], penalty: float) -> torch.Tensor:
        work = self.ring.take()  # clean: returned to the caller
        work.copy_(logits)
        for t in set(history):
            work[t] = work[t] / penalty if work[t] > 0 else work[t] * penalty
        return work

    def sample_penalized(self, logits: torch.Tensor, history: List[int], p: SamplingParams) -> int:
        w = self.penalize(logits, history, p.repetition_penalty)  # clean: put back after the draw
        tok = int(torch.multinomial(w.softmax(-1), 1))
        self.ring.put_back(w)
        return tok

    def logprob(self, logits: torch.Tensor, history: List[int], tok: int) -> float:
        return self.penalize(logits, history, 1.1).log_softmax(-1)[tok].item()  # leak: the taken buffer is used in an expression and dropped

    def process(self, history: List[int], logits: torch.Tensor) -> torch.Tensor:
        work = self.ring.take()  # leak: as soon as there is a processor nothing is put back
        work.copy_(logits)
        for fn in self.processors:
            work = fn(history, work)
        out = work.clone()
        if not self.processors:
            self.ring.put_back(work)
        return out

    def process_kept(self, history: List[int], logits: torch.Tensor) -> torch.Tensor:
        base = self.ring.take()  # clean: near miss, a second name goes through the processors, base is put back
        base.copy_(logits)
        cur = base
        for fn in self.processors:
            cur = fn(history, cur)
        out = cur.clone()
        self.ring.put_back(base)
        return out

    def set_bias(self, bias: Dict[int, float]) -> None:
        if self._bias is None:
            self._bias = self.ring.take()  # clean: near miss, only taken when the field is empty, clear_bias puts it back
        self._bias.zero_()
        for t, v in bias.items():
            self._bias[t] = v

    def clear_bias(self) -> None:
        if self._bias is not None:
            self.ring.put_back(self._bias)
            self._bias = None

    def gumbel_pair(self, a: torch.Tensor, b: torch.Tensor) -> Tuple[int, int]:
        noise, work = self.ring.take(), self.ring.take()  # clean: both put back
        noise.uniform_().log_().neg_().log_().neg_()
        work.copy_(a).add_(noise)
        x = int(work.argmax())
        work.copy_(b).add_(noise)
        y = int(work.argmax())
        self.ring.put_back(work)
        self.ring.put_back(noise)
        return x, y


def beam_scores(ring: BufferRing, rows: torch.Tensor, width: int) -> List[Tuple[float, int, int]]:
    cands: List[Tuple[float, int, int]] = []
    for r in range(rows.shape[0]):
        buf = ring.take()  # leak: only the rows with a finite maximum put their buffer back
        torch.log_softmax(rows[r], dim=-1, out=buf)
        top = buf.topk(width)
        if torch.isfinite(top.values[0]):
            cands.extend((float(v), r, int(i)) for v, i in zip(top.values, top.indices))
            ring.put_back(buf)
    return sorted(cands, reverse=True)[:width]
