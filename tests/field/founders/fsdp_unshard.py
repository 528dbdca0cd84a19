"""Unshard/reshard of flat parameters with a pool of all-gather buffers."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Dict, List, Optional


class FlatBuffer:
    """Stand-in for a flat device tensor."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data = [0.0] * numel

    def copy_(self, src: "FlatBuffer") -> None:
        n = min(self.numel, src.numel)
        self.data[:n] = src.data[:n]

    def clone(self) -> "FlatBuffer":
        out = FlatBuffer(self.numel)
        out.copy_(self)
        return out


class GatherPool:
    """Buffers by size class; `borrow` may answer None when the budget is spent."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._free: Dict[int, List[FlatBuffer]] = defaultdict(list)
        self._lock = threading.Lock()

    def borrow(self, numel: int) -> Optional[FlatBuffer]:
        with self._lock:
            if self._free[numel]:
                return self._free[numel].pop()
            if self._used + numel > self._budget:
                return None
            self._used += numel
            return FlatBuffer(numel)

    def give_back(self, buf: FlatBuffer) -> None:
        with self._lock:
            self._free[buf.numel].append(buf)

    def borrow_pair(self, a: int, b: int) -> Optional[tuple]:
        first = self.borrow(a)  # leak: second allocation fails and the first is not rolled back
        if first is None:
            return None
        second = self.borrow(b)  # clean: returned with the first, or None
        if second is None:
            return None
        return first, second


@dataclass
class FlatParam:
    name: str
    numel: int
    shard: FlatBuffer
    full: Optional[FlatBuffer] = None
    requires_grad: bool = True
    grad_full: Optional[FlatBuffer] = None


def all_gather_into(dst: FlatBuffer, shard: FlatBuffer, world: int) -> None:
    if shard.numel * world > dst.numel:
        raise RuntimeError("all-gather output too small")
    for r in range(world):
        dst.data[r * shard.numel:(r + 1) * shard.numel] = shard.data


class FlatParamHandle:
    def __init__(self, param: FlatParam, pool: GatherPool, world: int) -> None:
        self.param = param
        self.pool = pool
        self.world = world
        self._prefetched: Optional[FlatBuffer] = None

    def unshard(self) -> bool:
        if self.param.full is not None:
            return True
        if self._prefetched is not None:
            self.param.full, self._prefetched = self._prefetched, None
            return True
        buf = self.pool.borrow(self.param.numel)  # clean: stored in param.full, reshard gives it back
        if buf is None:
            return False
        all_gather_into(buf, self.param.shard, self.world)
        self.param.full = buf
        return True

    def prefetch(self) -> None:
        if self.param.full is not None or self._prefetched is not None:
            return
        buf = self.pool.borrow(self.param.numel)  # clean: near miss, moved to _prefetched and drained by unshard or reshard
        if buf is None:
            return
        all_gather_into(buf, self.param.shard, self.world)
        self._prefetched = buf

    def reshard(self) -> None:
        if self._prefetched is not None:
            self.pool.give_back(self._prefetched)
            self._prefetched = None
        if self.param.full is not None:
            self.pool.give_back(self.param.full)
            self.param.full = None

    def begin_grad(self) -> None:
        buf = self.pool.borrow(self.param.numel)  # leak: accumulate calls this per micro-batch and overwrites grad_full that still holds a buffer
        if buf is None:
            raise MemoryError(self.param.name)
        self.param.grad_full = buf

    def accumulate(self, micro_batches: List[FlatBuffer]) -> None:
        for mb in micro_batches:
            self.begin_grad()
            self.param.grad_full.copy_(mb)
        self.reduce_grad()

    def reduce_grad(self) -> None:
        grad = self.param.grad_full
        if grad is None:
            return
        self.param.shard.copy_(grad)
        self.param.grad_full = None
        self.pool.give_back(grad)


class Summoner:
    """Summons full parameters for evaluation and export."""

    def __init__(self, handles: List[FlatParamHandle], pool: GatherPool) -> None:
        self.handles = handles
        self.pool = pool

    def _gathered(self, h: FlatParamHandle) -> FlatBuffer:
        out = self.pool.borrow(h.param.numel)  # clean: handed to the caller
        if out is None:
            raise MemoryError(h.param.name)
        all_gather_into(out, h.param.shard, h.world)
        return out

    def state_dict(self) -> Dict[str, FlatBuffer]:
        out: Dict[str, FlatBuffer] = {}
        for h in self.handles:
            full = self._gathered(h)  # clean: cloned and given back
            out[h.param.name] = full.clone()
            self.pool.give_back(full)
        return out

    def export_one(self, name: str) -> Optional[FlatBuffer]:
        for h in self.handles:
            if h.param.name == name:
                return self._gathered(h).clone()  # leak: pooled buffer is cloned and dropped
        return None

    def norms(self) -> Dict[str, float]:
        out: Dict[str, float] = {}
        for h in self.handles:
            full = self._gathered(h)  # leak: frozen parameters continue without give_back
            if not h.param.requires_grad:
                continue
            out[h.param.name] = sum(x * x for x in full.data) ** 0.5
            self.pool.give_back(full)
        return out

    def swap_tied(self, a: FlatParamHandle, b: FlatParamHandle) -> bool:
        pair = self.pool.borrow_pair(a.param.numel, b.param.numel)  # clean: near miss, both members given back after unpacking
        if pair is None:
            return False
        left, right = pair
        try:
            left.copy_(a.param.shard)
            right.copy_(b.param.shard)
            a.param.shard.copy_(right)
            b.param.shard.copy_(left)
        finally:
            for buf in pair:
                self.pool.give_back(buf)
        return True

    def compare(self, h: FlatParamHandle, reference: FlatBuffer, keep: bool) -> Optional[FlatBuffer]:
        scratch = self.pool.borrow(reference.numel)  # clean: near miss, keep decides and both ways are served
        if scratch is None:
            return None
        scratch.copy_(h.param.shard)
        same = scratch.data == reference.data
        if not keep:
            self.pool.give_back(scratch)
        if not same:
            print("mismatch", h.param.name)
        return scratch if keep else None

    def check_all(self, reference: FlatBuffer) -> None:
        for h in self.handles:
            diff = self.compare(h, reference, keep=True)  # leak: kept buffer is given back only when its sum is nonzero
            if diff is not None and sum(diff.data) > 0:
                print(h.param.name, sum(diff.data))
                self.pool.give_back(diff)


def main() -> None:
    pool = GatherPool(1 << 12)
    handles = [FlatParamHandle(FlatParam(f"layer{i}", 16, FlatBuffer(4)), pool, 4) for i in range(3)]
    for h in handles:
        h.prefetch()
        assert h.unshard()
        h.begin_grad()
        h.reduce_grad()
        h.reshard()
    s = Summoner(handles, pool)
    s.state_dict()
    s.export_one("layer1")
    s.norms()
    s.swap_tied(handles[0], handles[1])
    s.check_all(FlatBuffer(4))


if __name__ == "__main__":
    main()
