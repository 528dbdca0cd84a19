"""Brute-force and IVF search kernels with scratch tensors cached by shape.

The scratch pool keeps tensors by (shape, dtype).  `borrow_like` and `borrow` hand one
out, `settle` takes it back.  Results that leave this module are always copies.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Iterable, Sequence

import torch

ShapeKey = tuple[tuple[int, ...], torch.dtype]


class Scratch:
    def __init__(self, device: torch.device, max_elems: int = 1 << 28) -> None:
        self.device = device
        self.max_elems = max_elems
        self.out_elems = 0
        self._shelf: dict[ShapeKey, list[torch.Tensor]] = defaultdict(list)

    def borrow(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        key = (tuple(shape), dtype)
        n = 1
        for s in shape:
            n *= s
        if self.out_elems + n > self.max_elems:
            return None
        self.out_elems += n
        if self._shelf[key]:
            return self._shelf[key].pop()  # clean: returned to the caller
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def borrow_like(self, t: torch.Tensor) -> torch.Tensor | None:
        return self.borrow(t.shape, t.dtype)  # clean: returned to the caller

    def must(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        t = self.borrow(shape, dtype)  # clean: returned to the caller
        if t is None:
            raise MemoryError(tuple(shape))
        return t

    def settle(self, *ts: torch.Tensor | None) -> None:
        for t in ts:
            if t is None:
                continue
            self.out_elems -= t.numel()
            self._shelf[(tuple(t.shape), t.dtype)].append(t)

    def forget(self) -> None:
        self._shelf.clear()


def _sqdist(scratch: Scratch, q: torch.Tensor, db: torch.Tensor) -> torch.Tensor:
    """Pooled: the caller settles it."""
    d = scratch.must((q.shape[0], db.shape[0]))  # clean: returned to callers that settle it
    torch.mm(q, db.t(), out=d)
    d.mul_(-2).add_((db * db).sum(1))
    return d


def _normalised(scratch: Scratch, x: torch.Tensor) -> torch.Tensor:
    """Pooled if a copy was needed, otherwise x itself."""
    if torch.allclose(x.norm(dim=1), torch.ones((), device=x.device)):
        return x
    out = scratch.must(x.shape, x.dtype)  # clean: returned, callers compare it with x
    torch.div(x, x.norm(dim=1, keepdim=True), out=out)
    return out


class FlatIndex:
    def __init__(self, db: torch.Tensor, scratch: Scratch) -> None:
        self.db = db
        self.scratch = scratch

    def search(self, q: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        d = _sqdist(self.scratch, q, self.db)  # clean: settled in finally
        try:
            val, idx = d.topk(k, largest=False)
            return val, idx
        finally:
            self.scratch.settle(d)

    def nearest(self, q: torch.Tensor) -> torch.Tensor:
        return _sqdist(self.scratch, q, self.db).argmin(1)  # leak: the distance matrix is dropped after argmin

    def cosine(self, q: torch.Tensor, k: int) -> torch.Tensor:
        qn = _normalised(self.scratch, q)  # clean: near miss, settled exactly when it is not q
        try:
            sims = self.scratch.must((q.shape[0], self.db.shape[0]))  # clean: settled after topk
            torch.mm(qn, self.db.t(), out=sims)
            idx = sims.topk(k).indices
            self.scratch.settle(sims)
            return idx
        finally:
            if qn is not q:
                self.scratch.settle(qn)

    def cosine_mean(self, q: torch.Tensor) -> float:
        qn = _normalised(self.scratch, q)  # leak: a pooled copy is never settled
        return (qn @ self.db.t()).mean().item()

    def range_search(self, q: torch.Tensor, radius: float) -> list[torch.Tensor]:
        out = []
        for row in q.split(1):
            d = _sqdist(self.scratch, row, self.db)  # leak: continue on no hit skips settle
            hits = (d[0] < radius).nonzero().flatten()
            if hits.numel() == 0:
                out.append(hits)
                continue
            order = d[0, hits].argsort()
            out.append(hits[order])
            self.scratch.settle(d)
        return out

    def add_blocks(self, q: torch.Tensor, blocks: Iterable[torch.Tensor], k: int) -> torch.Tensor | None:
        best = None
        try:
            for b in blocks:
                d = _sqdist(self.scratch, q, b)  # clean: near miss, settled, or kept as best and the former best settled
                if best is not None and d.min() >= best.min():
                    self.scratch.settle(d)
                    continue
                if best is not None:
                    self.scratch.settle(best)
                best = d
            if best is None:
                return None
            return best.topk(min(k, best.shape[1]), largest=False).indices
        finally:
            self.scratch.settle(best)


class IVFIndex:
    def __init__(self, centroids: torch.Tensor, lists: list[torch.Tensor], scratch: Scratch) -> None:
        self.centroids = centroids
        self.lists = lists
        self.scratch = scratch

    def probe(self, q: torch.Tensor, nprobe: int) -> torch.Tensor:
        d = _sqdist(self.scratch, q, self.centroids)  # clean: settled before the copy is returned
        ids = d.topk(nprobe, largest=False).indices.clone()
        self.scratch.settle(d)
        return ids

    def search_one(self, q: torch.Tensor, k: int, nprobe: int) -> torch.Tensor | None:
        cells = self.probe(q, nprobe)[0].tolist()
        cand = self.scratch.borrow((sum(len(self.lists[c]) for c in cells), q.shape[1]))  # leak: not settled when there are fewer candidates than k
        if cand is None:
            return None
        torch.cat([self.lists[c] for c in cells], out=cand)
        if cand.shape[0] < k:
            return None
        d = _sqdist(self.scratch, q, cand)  # clean: settled together with cand
        idx = d.topk(k, largest=False).indices.clone()
        self.scratch.settle(d, cand)
        return idx

    def residuals(self, x: torch.Tensor, assign: torch.Tensor) -> torch.Tensor | None:
        gathered = self.scratch.borrow_like(x)  # leak: not settled when the second tensor is refused
        if gathered is None:
            return None
        out = self.scratch.borrow_like(x)  # clean: settled after the clone
        if out is None:
            return None
        torch.index_select(self.centroids, 0, assign, out=gathered)
        torch.sub(x, gathered, out=out)
        res = out.clone()
        self.scratch.settle(gathered, out)
        return res


class QueryBuffer:
    """Batches single queries; the buffer doubles when it is full."""

    def __init__(self, scratch: Scratch, width: int, cap: int = 16) -> None:
        self.scratch = scratch
        self.width = width
        self.fill = 0
        self.buf = scratch.must((cap, width))  # leak: replaced by push() at the first doubling

    def push(self, q: torch.Tensor) -> None:
        if self.fill == self.buf.shape[0]:
            grown = self.scratch.must((2 * self.fill, self.width))  # leak: replaced in turn by the next doubling
            grown[: self.fill].copy_(self.buf)
            self.buf = grown
        self.buf[self.fill].copy_(q)
        self.fill += 1

    def take(self) -> torch.Tensor:
        out = self.buf[: self.fill].clone()
        self.fill = 0
        return out

    def close(self) -> None:
        self.scratch.settle(self.buf)
