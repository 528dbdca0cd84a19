"""Sharded AdamW: every rank owns a slice of the flat parameters and gathers the rest on demand."""
from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional

try:
    import torch
except ImportError:  # CPU-only CI image
    torch = None

log = logging.getLogger(__name__)


def _empty(numel: int):
    if torch is not None:
        return torch.zeros(numel)
    return [0.0] * numel


class GatherBufferPool:
    """A fixed number of flat buffers that receive all-gathered parameters."""

    def __init__(self, numel: int, count: int):
        self.numel = numel
        self._free = [_empty(numel) for _ in range(count)]
        self._cond = threading.Condition()
        self.in_use = 0

    def acquire(self):
        with self._cond:
            while not self._free:
                self._cond.wait()
            self.in_use += 1
            return self._free.pop()

    def try_acquire(self):
        with self._cond:
            if not self._free:
                return None
            self.in_use += 1
            return self._free.pop()

    def release(self, buf) -> None:
        with self._cond:
            self._free.append(buf)
            self.in_use -= 1
            self._cond.notify()


@dataclass
class ShardedParam:
    name: str
    shard: List[float]
    grad: Optional[List[float]] = None
    frozen: bool = False
    full: Optional[object] = None
    step: int = 0


class GatheredParam:
    """``with GatheredParam(pool, p) as full`` - the full parameter for the length of a block."""

    def __init__(self, pool: GatherBufferPool, param: ShardedParam, writeback: bool = True):
        self.pool = pool
        self.param = param
        self.writeback = writeback
        self._buf = None

    def __enter__(self):
        self._buf = self.pool.acquire()  # leak: __exit__ returns before the release when the parameter is frozen
        _all_gather(self._buf, self.param)
        return self._buf

    def __exit__(self, exc_type, exc, tb):
        if self.param.frozen or not self.writeback:
            return False
        _scatter(self._buf, self.param)
        self.pool.release(self._buf)
        self._buf = None
        return False


def _all_gather(buf, param: ShardedParam) -> None:
    for i, v in enumerate(param.shard):
        buf[i] = v


def _scatter(buf, param: ShardedParam) -> None:
    for i in range(len(param.shard)):
        param.shard[i] = float(buf[i])


class ParamGatherer:
    def __init__(self, pool: GatherBufferPool):
        self.pool = pool

    def materialize(self, p: ShardedParam):
        if p.full is None:
            p.full = self.pool.acquire()  # clean: near miss, kept in p.full under a None guard, partition gives it back
            _all_gather(p.full, p)
        return p.full

    def partition(self, p: ShardedParam) -> None:
        if p.full is None:
            return
        _scatter(p.full, p)
        self.pool.release(p.full)
        p.full = None

    def gather(self, p: ShardedParam):
        buf = self.pool.acquire()  # clean: handed on to the caller
        _all_gather(buf, p)
        return buf


class ShardedAdamW:
    def __init__(self, params: List[ShardedParam], pool: GatherBufferPool, lr: float = 1e-3,
                 weight_decay: float = 0.0):
        self.params = params
        self.pool = pool
        self.lr = lr
        self.weight_decay = weight_decay
        self.gatherer = ParamGatherer(pool)

    def step(self) -> int:
        updated = 0
        for p in self.params:
            work = self.pool.acquire()  # leak: continue for parameters without a gradient skips the release
            _all_gather(work, p)
            p.step += 1
            if p.grad is None:
                continue
            for i, g in enumerate(p.grad):
                work[i] = work[i] * (1 - self.lr * self.weight_decay) - self.lr * g
            _scatter(work, p)
            self.pool.release(work)
            updated += 1
        return updated

    def param_norm(self, p: ShardedParam) -> float:
        full = self.gatherer.gather(p)  # clean: released in finally
        try:
            return math.sqrt(sum(float(x) ** 2 for x in full))
        finally:
            self.pool.release(full)

    def state_dict(self) -> Dict[str, List[float]]:
        out: Dict[str, List[float]] = {}
        for p in self.params:
            full = self.gatherer.gather(p)  # leak: copied into the state and dropped
            out[p.name] = [float(x) for x in full][: len(p.shard)]
        return out

    def swap(self, a: ShardedParam, b: ShardedParam) -> bool:
        """Exchange two tied parameters; gives up when the pool is busy."""
        left = self.pool.try_acquire()  # leak: kept when the second buffer is not to be had
        if left is None:
            return False
        right = self.pool.try_acquire()  # clean: released on the way out
        if right is None:
            log.debug("no buffer to swap %s with %s", a.name, b.name)
            return False
        _all_gather(left, a)
        _all_gather(right, b)
        _scatter(left, b)
        _scatter(right, a)
        self.pool.release(right)
        self.pool.release(left)
        return True

    def average(self, a: ShardedParam, b: ShardedParam) -> bool:
        left = self.pool.try_acquire()  # clean: rolled back when the second fails
        if left is None:
            return False
        right = self.pool.try_acquire()  # clean: released on the way out
        if right is None:
            self.pool.release(left)
            return False
        _all_gather(left, a)
        _all_gather(right, b)
        for i in range(len(a.shard)):
            a.shard[i] = b.shard[i] = (float(left[i]) + float(right[i])) / 2
        for buf in (left, right):
            self.pool.release(buf)
        return True
