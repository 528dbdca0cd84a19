"""Unsharding of flat parameters for a fully sharded data parallel wrapper."""
from __future__ import annotations

import logging
from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Tuple

try:
    import torch
    import torch.distributed as dist
except ImportError:  # unit tests run on hosts without torch
    torch = None
    dist = None

log = logging.getLogger("fsdp")


class UnshardBuffer:
    __slots__ = ("key", "data", "ready")

    def __init__(self, key: Tuple[int, str], data) -> None:
        self.key = key
        self.data = data
        self.ready = False


def _empty(numel: int, dtype: str):
    if torch is None:
        return [0.0] * numel
    return torch.empty(numel, dtype=getattr(torch, dtype), device="cuda")


class UnshardPool:
    """Recycles full-size parameter buffers by (numel, dtype)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.outstanding = 0
        self._idle: Dict[Tuple[int, str], List[UnshardBuffer]] = {}

    def acquire(self, numel: int, dtype: str) -> UnshardBuffer:
        idle = self._idle.get((numel, dtype))
        self.outstanding += 1
        if idle:
            return idle.pop()
        return UnshardBuffer((numel, dtype), _empty(numel, dtype))

    def try_acquire(self, numel: int, dtype: str) -> Optional[UnshardBuffer]:
        if self.outstanding >= self.limit:
            return None
        return self.acquire(numel, dtype)  # clean: returned to the caller

    def release(self, buf: UnshardBuffer) -> None:
        buf.ready = False
        self.outstanding -= 1
        self._idle.setdefault(buf.key, []).append(buf)


class FlatParam:
    """One flattened group: the local shard and, while in use, the full tensor."""

    def __init__(self, name: str, shard: List[float], world: int, pool: UnshardPool) -> None:
        self.name = name
        self.shard = shard
        self.world = world
        self.pool = pool
        self.full: Optional[UnshardBuffer] = None
        self.full_grad: Optional[UnshardBuffer] = None
        self.low_precision = True

    @property
    def numel(self) -> int:
        return len(self.shard) * self.world

    def gather_into(self, buf: UnshardBuffer) -> None:
        if dist is not None and dist.is_initialized():
            dist.all_gather_into_tensor(buf.data, self.shard)
        else:
            for r in range(self.world):
                base = r * len(self.shard)
                buf.data[base:base + len(self.shard)] = self.shard
        buf.ready = True

    def materialize(self) -> UnshardBuffer:
        if self.full is not None:
            return self.full
        buf = self.pool.acquire(self.numel, "float32")  # clean: kept in self.full, drop_full releases it
        self.gather_into(buf)
        self.full = buf
        return buf

    def drop_full(self) -> None:
        if self.full is not None:
            self.pool.release(self.full)
            self.full = None

    def drop_grad(self) -> None:
        if self.full_grad is not None:
            self.pool.release(self.full_grad)
            self.full_grad = None

    def compute_view(self):
        """Data to hand to the kernel, cast when the group runs in low precision."""
        cast = self.pool.acquire(self.numel, "bfloat16")  # leak: early return of the full tensor forgets cast
        if not self.low_precision and self.full is not None:
            return self.full.data
        source = self.full.data if self.full is not None else self.shard
        cast.data[:len(source)] = source
        out = list(cast.data)
        self.pool.release(cast)
        return out

    def norm(self, pow2: Callable[[float], float]) -> float:
        scratch = self.pool.acquire(self.numel, "float32")  # clean: near miss, both returns lie inside try/finally
        try:
            self.gather_into(scratch)
            if not any(scratch.data):
                return 0.0
            return sum(pow2(x) for x in scratch.data) ** 0.5
        finally:
            self.pool.release(scratch)


class ForwardPrefetcher:
    """Gathers the next few groups while the present one computes."""

    def __init__(self, groups: List[FlatParam], depth: int) -> None:
        self.groups = groups
        self.depth = depth
        self._ahead: Deque[Tuple[int, UnshardBuffer]] = deque()

    def advance(self, at: int) -> None:
        for idx in range(at + 1, min(at + 1 + self.depth, len(self.groups))):
            group = self.groups[idx]
            if group.full is not None or any(i == idx for i, _ in self._ahead):
                continue
            buf = group.pool.try_acquire(group.numel, "float32")  # clean: near miss, the break is taken only for None, else queued
            if buf is None:
                log.debug("prefetch stopped at %s", group.name)
                break
            group.gather_into(buf)
            self._ahead.append((idx, buf))

    def install(self, at: int) -> bool:
        while self._ahead and self._ahead[0][0] <= at:
            idx, buf = self._ahead.popleft()
            group = self.groups[idx]
            if idx < at or group.full is not None:
                group.pool.release(buf)
                continue
            group.full = buf
            return True
        return False

    def close(self) -> None:
        while self._ahead:
            idx, buf = self._ahead.popleft()
            self.groups[idx].pool.release(buf)


class ShardedModule:
    def __init__(self, groups: List[FlatParam], prefetch: int = 2) -> None:
        self.groups = groups
        self.pool = groups[0].pool
        self.prefetcher = ForwardPrefetcher(groups, prefetch)
        self.grad_hooks: List[Callable[[FlatParam], None]] = []

    def forward(self, step: Callable[[FlatParam, list], None]) -> None:
        for at, group in enumerate(self.groups):
            if not self.prefetcher.install(at):
                group.materialize()  # clean: drop_full at the end of the same iteration
            self.prefetcher.advance(at)
            step(group, group.compute_view())
            group.drop_full()
        self.prefetcher.close()

    def backward(self, microbatches: int) -> None:
        for _ in range(microbatches):
            for group in reversed(self.groups):
                group.materialize()  # clean: drop_full follows
                group.full_grad = self.pool.acquire(group.numel, "float32")  # leak: the next microbatch overwrites it, drop_grad runs once per step
                for hook in self.grad_hooks:
                    hook(group)
                group.drop_full()
        for group in self.groups:
            group.drop_grad()

    def summon_full(self, names: List[str]) -> Dict[str, list]:
        """Copies of the full parameters named, for export."""
        out: Dict[str, list] = {}
        for group in self.groups:
            buf = group.pool.acquire(group.numel, "float32")  # leak: continue for an unwanted group skips the release
            if group.name not in names:
                continue
            group.gather_into(buf)
            out[group.name] = list(buf.data)
            group.pool.release(buf)
        return out

    def checksum(self) -> float:
        total = 0.0
        scratch: Optional[UnshardBuffer] = None
        for group in self.groups:
            if scratch is None or scratch.key[0] != group.numel:
                if scratch is not None:
                    self.pool.release(scratch)
                scratch = self.pool.acquire(group.numel, "float32")  # clean: near miss, the former one is released before rebinding
            group.gather_into(scratch)
            total += sum(scratch.data)
        if scratch is not None:
            self.pool.release(scratch)
        return total
