"""Tensor-parallel collectives on symmetric-memory buffers.

Every collective writes into a buffer of the group's pool; peers map the same offsets, so
buffers are a fixed resource and have to go back to the pool.
"""
from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional, Sequence, Tuple

try:
    import torch
except ImportError:
    torch = None


class SymTensor:
    """A view of a symmetric buffer (stands in for a torch tensor on machines without one)."""

    def __init__(self, values: List[float], base: Optional["SymTensor"] = None) -> None:
        self.values = values
        self._base = base

    @property
    def base(self) -> "SymTensor":
        return self if self._base is None else self._base

    def numel(self) -> int:
        return len(self.values)

    def clone(self) -> "SymTensor":
        return SymTensor(list(self.values))

    def copy_(self, src: "SymTensor") -> "SymTensor":
        n = min(len(self.values), len(src.values))
        self.values[:n] = src.values[:n]
        return self

    def narrow(self, length: int) -> "SymTensor":
        return SymTensor(self.values[:length], self.base)

    def add_(self, other: "SymTensor") -> "SymTensor":
        for i, v in enumerate(other.values[: len(self.values)]):
            self.values[i] += v
        return self


class SymmBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._lock = threading.Lock()
        self._idle = [SymTensor([0.0] * numel) for _ in range(count)]

    def borrow(self) -> SymTensor:
        with self._lock:
            if not self._idle:
                raise RuntimeError("symmetric memory exhausted")
            return self._idle.pop()

    def borrow_or_none(self) -> Optional[SymTensor]:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, buf: SymTensor) -> None:
        with self._lock:
            self._idle.append(buf.base)


class TPGroup:
    def __init__(self, rank: int, world: int, pool: SymmBufferPool) -> None:
        self.rank = rank
        self.world = world
        self.pool = pool

    def all_reduce(self, x: SymTensor) -> SymTensor:
        """The result lives in a pooled buffer, which the caller gives back."""
        out = self.pool.borrow()  # clean: handed to the caller
        out.copy_(x)
        for _ in range(self.world - 1):
            out.add_(x)
        return out

    def all_gather(self, x: SymTensor) -> SymTensor:
        out = self.pool.borrow()  # clean: handed to the caller as a view, give_back resolves the base
        out.copy_(x)
        return out.narrow(x.numel() * self.world)

    def reduce_scatter_into(self, src: SymTensor) -> SymTensor:
        """Takes over src."""
        out = self.pool.borrow()  # clean: handed to the caller, src is given back here
        out.copy_(src)
        self.pool.give_back(src)
        return out

    def scale(self, src: SymTensor, factor: float) -> SymTensor:
        out = self.pool.borrow()  # clean: handed to the caller
        for i, v in enumerate(src.values):
            out.values[i] = v * factor
        return out

    def all_reduce_(self, x: SymTensor) -> SymTensor:
        buf = self.pool.borrow()  # clean: copied back and given back
        buf.copy_(x)
        buf.add_(x)
        x.copy_(buf)
        self.pool.give_back(buf)
        return x


class RowParallelLinear:
    def __init__(self, tp: TPGroup, bias: Optional[SymTensor] = None, reduce_results: bool = True) -> None:
        self.tp = tp
        self.bias = bias
        self.reduce_results = reduce_results

    def forward(self, x: SymTensor) -> SymTensor:
        if not self.reduce_results or self.tp.world == 1:
            return x.clone()
        reduced = self.tp.all_reduce(x)  # leak: cloned and dropped, the pooled buffer never goes back
        return reduced.clone()

    def forward_fused(self, x: SymTensor) -> SymTensor:
        if self.tp.world == 1:
            return x.clone()
        reduced = self.tp.all_reduce(x)  # clean: near miss, cloned and then given back
        if self.bias is not None:
            reduced.add_(self.bias)
        out = reduced.clone()
        self.tp.pool.give_back(reduced)
        return out

    def forward_into(self, x: SymTensor, out: SymTensor) -> None:
        out.copy_(self.tp.all_reduce(x))  # leak: the pooled result is only an argument and nobody keeps it

    def forward_scaled(self, x: SymTensor, factor: float) -> SymTensor:
        h = self.tp.all_reduce(x)  # leak: rebound to scale's own buffer
        if factor != 1.0:
            h = self.tp.scale(h, factor)  # clean: given back below
        out = h.clone()
        self.tp.pool.give_back(h)
        return out

    def forward_sequence_parallel(self, x: SymTensor) -> SymTensor:
        h = self.tp.all_gather(x)  # clean: near miss, rebound, but reduce_scatter_into takes the old one over
        h = self.tp.reduce_scatter_into(h)  # clean: given back after the copy
        out = h.clone()
        self.tp.pool.give_back(h)
        return out


class LogitsProcessor:
    def __init__(self, tp: TPGroup, vocab: int) -> None:
        self.tp = tp
        self.vocab = vocab

    def _gather(self, local: SymTensor) -> Optional[SymTensor]:
        """Only rank 0 needs the logits."""
        full = self.tp.all_gather(local)  # leak: ranks other than 0 return None without giving it back
        if self.tp.rank != 0:
            return None
        return full

    def _gather_rank0(self, local: SymTensor) -> Optional[SymTensor]:
        full = self.tp.all_gather(local)  # clean: near miss, given back on the other ranks, handed on at rank 0
        if self.tp.rank != 0:
            self.tp.pool.give_back(full)
            return None
        return full

    def logits(self, local: SymTensor) -> Optional[SymTensor]:
        full = self._gather(local)  # clean: None-checked, given back after the copy
        if full is None:
            return None
        out = full.narrow(self.vocab).clone()
        self.tp.pool.give_back(full)
        return out

    def argmax(self, local: SymTensor) -> int:
        full = self._gather_rank0(local)  # leak: a gathered tensor narrower than the vocabulary returns -1 early
        if full is None or full.numel() < self.vocab:
            return -1
        best = max(range(self.vocab), key=full.values.__getitem__)
        self.tp.pool.give_back(full)
        return best

    def top1(self, local: SymTensor) -> Tuple[int, float]:
        full = self._gather_rank0(local)  # clean: near miss, give_back of the narrowed view reaches the base
        if full is None:
            return -1, 0.0
        view = full.narrow(self.vocab)
        best = max(range(view.numel()), key=view.values.__getitem__)
        value = view.values[best]
        self.tp.pool.give_back(view)
        return best, value


class OverlapBuffers:
    """Ping-pong buffers for comm/compute overlap; names keep layers apart."""

    def __init__(self, tp: TPGroup) -> None:
        self.tp = tp
        self.named: Dict[str, SymTensor] = {}
        self.spare: Optional[SymTensor] = None

    def ensure(self, name: str) -> SymTensor:
        buf = self.named.get(name)
        if buf is None:
            buf = self.tp.pool.borrow()  # clean: kept under its name, teardown gives all back
            self.named[name] = buf
        return buf

    def reset_spare(self) -> None:
        self.spare = self.tp.pool.borrow_or_none()  # leak: every reset overwrites the earlier spare

    def rename(self, old: str, new: str) -> None:
        buf = self.named.pop(old, None)
        if buf is None:
            return
        stale = self.named.pop(new, None)
        if stale is not None:
            self.tp.pool.give_back(stale)
        self.named[new] = buf

    def teardown(self) -> None:
        while self.named:
            _, buf = self.named.popitem()
            self.tp.pool.give_back(buf)
        if self.spare is not None:
            self.tp.pool.give_back(self.spare)
            self.spare = None


def pipeline_reduce(tp: TPGroup, chunks: Sequence[SymTensor], sink: Callable[[SymTensor], None]) -> None:
    acc = tp.pool.borrow()  # clean: given back after the loop, chunk buffers separately
    for chunk in chunks:
        part = tp.all_reduce(chunk)  # clean: near miss, both branches give it back
        if part.numel() == 0:
            tp.pool.give_back(part)
            continue
        acc.add_(part)
        tp.pool.give_back(part)
    sink(acc.clone())
    tp.pool.give_back(acc)


if __name__ == "__main__":
    pool = SymmBufferPool(4, 8)
    tp = TPGroup(0, 2, pool)
    x = SymTensor([1.0, 2.0])
    lin = RowParallelLinear(tp)
    assert lin.forward_fused(x).values[:2] == [2.0, 4.0]
    lin.forward_sequence_parallel(x)
    lp = LogitsProcessor(tp, 2)
    assert lp.logits(x) is not None and lp.top1(x)[0] == 1
    ob = OverlapBuffers(tp)
    ob.ensure("qkv")
    ob.rename("qkv", "o")
    ob.teardown()
    res: List[SymTensor] = []
    pipeline_reduce(tp, [x, x], res.append)
    assert len(pool._idle) == 4
