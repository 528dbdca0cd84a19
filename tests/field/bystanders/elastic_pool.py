"""A pool of KV arenas which grows and shrinks with the load."""
from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Deque, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class Arena:
    ident: int
    data: torch.Tensor
    stamp: float = field(default_factory=time.monotonic)
    dirty: bool = False


class ElasticPool:
    def __init__(self, size: int, initial: int, maximum: int) -> None:
        self.size = size
        self.maximum = maximum
        self._cond = threading.Condition()
        self._free: Deque[Arena] = deque(self._make(i) for i in range(initial))
        self._retired: List[Arena] = []
        self._total = initial

    def _make(self, ident: int) -> Arena:
        return Arena(ident, torch.zeros(self.size))

    def reserve(self, timeout: float = 1.0) -> Optional[Arena]:
        with self._cond:
            if not self._free and self._total < self.maximum:
                self._total += 1
                return self._make(self._total)
            if not self._cond.wait_for(lambda: len(self._free) > 0, timeout):
                return None
            return self._free.popleft()

    def unreserve(self, a: Arena) -> None:
        with self._cond:
            a.stamp = time.monotonic()
            self._free.append(a)
            self._cond.notify()

    def reserve_clean(self) -> Optional[Arena]:
        with self._cond:
            while self._free:
                a = self._free.popleft()  # leak: a dirty arena is skipped and neither kept nor retired
                if a.dirty:
                    continue
                return a
        return None

    def reserve_fresh(self, max_age: float) -> Optional[Arena]:
        now = time.monotonic()
        with self._cond:
            for _ in range(len(self._free)):
                a = self._free.popleft()  # clean: near miss, an old arena goes to the end of the line
                if now - a.stamp <= max_age:
                    return a
                self._free.append(a)
        return None

    def shrink(self, keep: int) -> int:
        n = 0
        with self._cond:
            while len(self._free) > keep:
                a = self._free.pop()  # clean: near miss, retired ones are kept for reuse by restore
                self._retired.append(a)
                self._total -= 1
                n += 1
        return n

    def restore(self) -> bool:
        with self._cond:
            if not self._retired:
                return False
            a = self._retired.pop()  # leak: at the maximum the arena is taken off the list and not put anywhere
            if self._total >= self.maximum:
                return False
            self._total += 1
            self._free.append(a)
            return True

    def scrub(self) -> None:
        with self._cond:
            for a in self._free:
                if a.dirty:
                    a.data.zero_()
                    a.dirty = False


class ArenaUser:
    def __init__(self, pool: ElasticPool) -> None:
        self.pool = pool
        self.current: Optional[Arena] = None
        self.by_job: Dict[str, Arena] = {}

    def switch(self) -> bool:
        nxt = self.pool.reserve()  # clean: near miss, the arena in use is unreserved before the field changes
        if nxt is None:
            return False
        if self.current is not None:
            self.pool.unreserve(self.current)
        self.current = nxt
        return True

    def leave(self) -> None:
        if self.current is not None:
            self.pool.unreserve(self.current)
            self.current = None

    def start_job(self, job: str) -> bool:
        if job in self.by_job:
            return False
        a = self.pool.reserve()  # clean: finish_job unreserves
        if a is None:
            return False
        self.by_job[job] = a
        return True

    def finish_job(self, job: str) -> None:
        a = self.by_job.pop(job, None)
        if a is not None:
            a.dirty = True
            self.pool.unreserve(a)

    def run(self, fn: Callable[[torch.Tensor], float]) -> Optional[float]:
        a = self.pool.reserve()  # leak: an overflow is caught and None returned, the arena stays reserved
        if a is None:
            return None
        try:
            value = fn(a.data)
        except OverflowError:
            logger.warning("overflow in arena %d", a.ident)
            return None
        self.pool.unreserve(a)
        return value

    def run_in_clean(self, fn: Callable[[torch.Tensor], float]) -> float:
        a = self.pool.reserve_clean() or self.pool.reserve()  # clean: near miss, the second is asked only when the first gave None
        if a is None:
            raise TimeoutError("no arena")
        try:
            return fn(a.data)
        finally:
            self.pool.unreserve(a)

    def sum_fresh(self, age: float) -> float:
        a = self.pool.reserve_fresh(age)  # leak: NaN sums raise before unreserve
        if a is None:
            return 0.0
        s = float(a.data.sum())
        if s != s:
            raise FloatingPointError(f"arena {a.ident} is corrupt")
        self.pool.unreserve(a)
        return s
