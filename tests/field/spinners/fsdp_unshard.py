"""Unshard buffers for fully sharded flat parameters.

Every rank keeps only its shard of a flat parameter. Before a unit runs, the
full parameter is gathered into a buffer of the UnshardPool.
"""
from __future__ import annotations

import logging
import math
import threading
from array import array
from collections import deque
from contextlib import contextmanager
from typing import Deque, Dict, Iterator, List, Optional, Sequence, Tuple

log = logging.getLogger(__name__)


class PoolExhausted(RuntimeError):
    pass


class FlatBuffer:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data = array("f", bytes(4 * numel))

    def copy_from(self, values: Sequence[float]) -> None:
        self.data[: len(values)] = array("f", values)

    def clone(self, numel: int) -> List[float]:
        return list(self.data[:numel])


class UnshardPool:
    """Buffers in a few size classes, each with its own free list."""

    def __init__(self, size_classes: Dict[int, int]) -> None:
        self._lock = threading.Lock()
        self._free: Dict[int, Deque[FlatBuffer]] = {
            size: deque(FlatBuffer(size) for _ in range(count))
            for size, count in size_classes.items()
        }

    def borrow(self, numel: int) -> FlatBuffer:
        with self._lock:
            for size in sorted(self._free):
                if size >= numel and self._free[size]:
                    return self._free[size].popleft()
        raise PoolExhausted(f"no unshard buffer for {numel} elements")

    def give_back(self, buf: FlatBuffer) -> None:
        with self._lock:
            self._free[buf.numel].append(buf)

    def available(self) -> int:
        with self._lock:
            return sum(len(q) for q in self._free.values())


class FlatParamHandle:
    def __init__(self, name: str, shard: Sequence[float], world_size: int,
                 pool: UnshardPool, frozen: bool = False) -> None:
        self.name = name
        self.shard = list(shard)
        self.world_size = world_size
        self.frozen = frozen
        self._pool = pool
        self._full: Optional[FlatBuffer] = None

    @property
    def numel(self) -> int:
        return len(self.shard) * self.world_size

    def unshard(self) -> FlatBuffer:
        if self._full is None:
            self._full = self._pool.borrow(self.numel)  # clean: kept on the handle, reshard gives it back
            self._full.copy_from(self.shard * self.world_size)
        return self._full

    def reshard(self) -> None:
        buf, self._full = self._full, None
        if buf is not None:
            self._pool.give_back(buf)

    def gather(self) -> FlatBuffer:
        """Gather into a buffer that belongs to the caller."""
        buf = self._pool.borrow(self.numel)  # clean: returned to the caller, who owns it
        buf.copy_from(self.shard * self.world_size)
        return buf


def export_param(handle: FlatParamHandle) -> List[float]:
    """Full values of one parameter, detached from the pool."""
    return handle.gather().clone(handle.numel)  # leak: cloned, and the gathered buffer is dropped


def grad_norm(handles: Sequence[FlatParamHandle], pool: UnshardPool) -> float:
    total = 0.0
    for handle in handles:
        buf = handle.gather()  # leak: continue for a frozen or zero parameter keeps the buffer
        scale = max((abs(x) for x in buf.data), default=0.0)
        if handle.frozen or scale == 0.0:
            continue
        total += sum((x / scale) ** 2 for x in buf.data) * scale * scale
        pool.give_back(buf)
    return math.sqrt(total)


@contextmanager
def summon_full(handle: FlatParamHandle, writeback: bool = False) -> Iterator[FlatBuffer]:
    buf = handle._pool.borrow(handle.numel)  # clean: near miss, the flag only decides on the copy, the finally always gives back
    try:
        buf.copy_from(handle.shard * handle.world_size)
        yield buf
        if writeback:
            handle.shard = buf.clone(handle.numel)[: len(handle.shard)]
    finally:
        handle._pool.give_back(buf)


def clamp_param(handle: FlatParamHandle, limit: float) -> None:
    with summon_full(handle, writeback=True) as full:  # clean: context manager gives back
        for i, x in enumerate(full.data):
            full.data[i] = max(-limit, min(limit, x))


class MixedPrecisionUnit:
    """A unit that needs a compute copy and, for fp32 reductions, a master copy."""

    def __init__(self, handle: FlatParamHandle, pool: UnshardPool) -> None:
        self.handle = handle
        self._pool = pool

    def try_pair(self) -> Optional[Tuple[FlatBuffer, FlatBuffer]]:
        try:
            compute = self._pool.borrow(self.handle.numel)  # leak: lost when the second borrow raises and the handler returns None
            master = self._pool.borrow(2 * self.handle.numel)  # clean: returned with its twin
        except PoolExhausted:
            log.debug("%s: no room for a buffer pair", self.handle.name)
            return None
        return compute, master

    def step(self) -> bool:
        pair = self.try_pair()  # clean: near miss, nothing is held when it is None, both are given back otherwise
        if pair is None:
            return False
        compute, master = pair
        try:
            compute.copy_from(self.handle.shard)
            master.copy_from(self.handle.shard)
        finally:
            self._pool.give_back(master)
            self._pool.give_back(compute)
        return True


class BackwardPrefetcher:
    """Keeps gathered buffers of the next units in the order of the backward pass."""

    def __init__(self, pool: UnshardPool, depth: int = 2) -> None:
        self._pool = pool
        self._depth = depth
        self._ready: Deque[Tuple[str, FlatBuffer]] = deque()

    def fill(self, upcoming: Sequence[FlatParamHandle]) -> None:
        for handle in upcoming:
            if len(self._ready) >= self._depth:
                break
            self._ready.append((handle.name, handle.gather()))  # leak: take() drops the entries that are out of order

    def take(self, handle: FlatParamHandle) -> FlatBuffer:
        while self._ready:
            name, buf = self._ready.popleft()
            if name == handle.name:
                return buf
            log.debug("prefetch of %s was not used", name)
        return handle.gather()  # clean: returned to the caller, who owns it

    def drain(self) -> None:
        while self._ready:
            _, buf = self._ready.popleft()
            self._pool.give_back(buf)


def run_backward(handles: Sequence[FlatParamHandle], pool: UnshardPool) -> int:
    prefetcher = BackwardPrefetcher(pool)
    order = list(reversed(handles))
    done = 0
    for i, handle in enumerate(order):
        full = prefetcher.take(handle)  # clean: given back before the next unit
        prefetcher.fill(order[i + 1:])
        done += len(full.data)
        pool.give_back(full)
    prefetcher.drain()
    return done


def run_forward(handles: Sequence[FlatParamHandle], keep_last: bool = True) -> float:
    """Forward pass; the last unit stays unsharded for the backward pass."""
    acc = 0.0
    last = len(handles) - 1
    for i, handle in enumerate(handles):
        full = handle.unshard()  # clean: near miss, the kept unit is the protocol, finish_step reshards it
        acc += full.data[0]
        if i == last and keep_last:
            break
        handle.reshard()
    return acc


def finish_step(handles: Sequence[FlatParamHandle]) -> None:
    for handle in handles:
        handle.reshard()
