"""Speculative decoding: lookahead slots, draft workspaces, tree verification."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Generator, Iterator, List, Optional, Sequence, Tuple

import torch


class LookaheadPool:
    """Ranges of lookahead slots, kept as (start, length) in a sorted free list."""

    def __init__(self, total: int) -> None:
        self._holes: List[Tuple[int, int]] = [(0, total)]

    def carve(self, n: int) -> Optional[Tuple[int, int]]:
        for i, (start, length) in enumerate(self._holes):
            if length >= n:
                if length == n:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + n, length - n)
                return start, n
        return None

    def fill(self, span: Tuple[int, int]) -> None:
        self._holes.append(span)
        self._holes.sort()
        merged: List[Tuple[int, int]] = []
        for s, n in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == s:
                merged[-1] = (merged[-1][0], merged[-1][1] + n)
            else:
                merged.append((s, n))
        self._holes = merged

    def carve_best(self, sizes: Sequence[int]) -> Optional[Tuple[int, int]]:
        """Largest size that can be had."""
        best = None
        for n in sorted(sizes):
            span = self.carve(n)  # leak: a smaller span found before is overwritten by a larger
            if span is not None:
                best = span
        return best

    def carve_first(self, sizes: Sequence[int]) -> Optional[Tuple[int, int]]:
        for n in sorted(sizes, reverse=True):
            span = self.carve(n)  # clean: near miss, the loop goes on only while it is None
            if span is None:
                continue
            return span
        return None


class DraftWorkspace:
    """Logit buffers by batch size."""

    def __init__(self, vocab: int, device: str = "cpu") -> None:
        self.vocab = vocab
        self.device = device
        self._cache: Dict[int, List[torch.Tensor]] = {}

    def logits(self, batch: int) -> torch.Tensor:
        lst = self._cache.get(batch)
        if lst:
            return lst.pop()
        return torch.empty(batch, self.vocab, device=self.device)

    def recycle(self, t: torch.Tensor) -> None:
        self._cache.setdefault(t.shape[0], []).append(t)


@dataclass
class SpecRequest:
    rid: str
    last: int
    span: Optional[Tuple[int, int]] = None
    tree: List[Tuple[int, int]] = field(default_factory=list)
    disabled: bool = False


class SpecDecoder:
    def __init__(self, draft: Any, target: Any, spans: LookaheadPool, ws: DraftWorkspace, k: int, greedy: bool) -> None:
        self.draft = draft
        self.target = target
        self.spans = spans
        self.ws = ws
        self.k = k
        self.greedy = greedy
        self.active: Dict[str, SpecRequest] = {}

    def propose(self, reqs: List[SpecRequest]) -> torch.Tensor:
        buf = self.ws.logits(len(reqs))  # leak: the greedy branch returns the argmax and drops buf
        self.draft.forward([r.last for r in reqs], out=buf)
        if self.greedy:
            return buf.argmax(-1)
        picked = torch.multinomial(buf.softmax(-1), 1).squeeze(-1)
        self.ws.recycle(buf)
        return picked

    def propose_greedy(self, reqs: List[SpecRequest]) -> torch.Tensor:
        buf = self.ws.logits(len(reqs))  # clean: recycled after argmax, which is a new tensor
        self.draft.forward([r.last for r in reqs], out=buf)
        picked = buf.argmax(-1)
        self.ws.recycle(buf)
        return picked

    def _target_logits(self, reqs: List[SpecRequest]) -> torch.Tensor:
        out = self.ws.logits(len(reqs))  # clean: returned to the caller
        self.target.forward([r.last for r in reqs], out=out)
        return out

    def score_copy(self, reqs: List[SpecRequest]) -> torch.Tensor:
        return self._target_logits(reqs).float().clone()  # leak: the pooled logits are cloned and dropped

    def score(self, reqs: List[SpecRequest]) -> torch.Tensor:
        logits = self._target_logits(reqs)  # clean: recycled after the copy
        host = logits.float().clone()
        self.ws.recycle(logits)
        return host

    def acceptance(self, reqs: List[SpecRequest]) -> Optional[torch.Tensor]:
        d = self.ws.logits(len(reqs))  # leak: not recycled when the target logits are not finite
        t = self._target_logits(reqs)  # clean: recycled on both ways
        self.draft.forward([r.last for r in reqs], out=d)
        if not bool(torch.isfinite(t).all()):
            self.ws.recycle(t)
            return None
        ratio = (t.softmax(-1) / d.softmax(-1).clamp_min(1e-9)).clamp_max(1.0)
        self.ws.recycle(d)
        self.ws.recycle(t)
        return ratio

    def enable(self, req: SpecRequest) -> bool:
        if req.span is not None:
            return True
        req.span = self.spans.carve(self.k)  # clean: held by the request, retire() fills it
        if req.span is None:
            req.disabled = True
            return False
        self.active[req.rid] = req
        return True

    def retire(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        if req.span is not None:
            self.spans.fill(req.span)
            req.span = None
        for s in req.tree:
            self.spans.fill(s)
        req.tree.clear()

    def resize(self, req: SpecRequest, k: int) -> bool:
        span = self.spans.carve(k)  # clean: the old span is filled before it is replaced
        if span is None:
            return False
        if req.span is not None:
            self.spans.fill(req.span)
        req.span = span
        self.active[req.rid] = req
        return True

    def grow_tree(self, req: SpecRequest, widths: Sequence[int]) -> bool:
        level: List[Tuple[int, int]] = []
        for w in widths:
            span = self.spans.carve(w)  # leak: levels carved so far are lost when one can't be had
            if span is None:
                return False
            level.append(span)
        req.tree.extend(level)
        return True

    def grow_tree_partial(self, req: SpecRequest, widths: Sequence[int]) -> int:
        if req.rid not in self.active:
            return 0
        for w in widths:
            span = self.spans.carve(w)  # clean: near miss, each level is on the request before the next
            if span is None:
                break
            req.tree.append(span)
        return len(req.tree)

    def prune_tree(self, req: SpecRequest, accepted: int) -> None:
        keep, rest = req.tree[:accepted], req.tree[accepted:]
        for s in rest:
            self.spans.fill(s)
        req.tree[:] = keep

    def stream_drafts(self, reqs: List[SpecRequest], steps: int) -> Iterator[torch.Tensor]:
        buf = self.ws.logits(len(reqs))  # leak: the early return inside the loop passes over recycle
        for _ in range(steps):
            self.draft.forward([r.last for r in reqs], out=buf)
            ids = buf.argmax(-1)
            if bool((ids == self.draft.eos).all()):
                return
            yield ids
        self.ws.recycle(buf)

    def stream_verified(self, reqs: List[SpecRequest], steps: int) -> Generator[torch.Tensor, None, None]:
        buf = self.ws.logits(len(reqs))  # clean: recycled in finally, also on an early return
        try:
            for _ in range(steps):
                self.target.forward([r.last for r in reqs], out=buf)
                ids = buf.argmax(-1)
                if bool((ids == self.target.eos).all()):
                    return
                yield ids
        finally:
            self.ws.recycle(buf)

    def step(self, reqs: List[SpecRequest]) -> Tuple[torch.Tensor, List[SpecRequest]]:
        spec = [r for r in reqs if not r.disabled and self.enable(r)]
        span = self.spans.carve(len(spec)) if spec else None  # clean: near miss, filled under the same guard
        ids = self.propose_greedy(spec) if spec else torch.empty(0, dtype=torch.long)
        if spec and span is not None:
            self.target.verify(span, ids)
        if span is not None:
            self.spans.fill(span)
        return ids, spec
