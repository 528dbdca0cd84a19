from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .comm import CommBuffer, CommBufferPool, Work


class GradBucketer:
    """Fills one buffer at a time and launches it when full."""

    def __init__(self, pool: CommBufferPool) -> None:
        self.pool = pool
        self.current: Optional[CommBuffer] = None
        self.works: List[Work] = []

    def add(self, n: int) -> None:
        if self.current is not None and self.current.fill + n > self.current.size:
            self._launch()
        if self.current is None:
            self.current = self.pool.acquire()  # clean: near miss, only into an empty field, _launch releases
        self.current.write(n)

    def _launch(self) -> None:
        buf, self.current = self.current, None
        self.works.append(Work(self.pool, buf))  # clean: flush waits for it
        self.pool.release(buf)

    def flush(self) -> int:
        if self.current is not None:
            self._launch()
        total = sum(work.wait() for work in self.works)
        self.works.clear()
        return total

    def reduce_one(self, n: int, fn: Callable[[CommBuffer], int]) -> int:
        buf = self.pool.acquire()  # leak: Work takes a reference of its own, the first one is never released
        buf.write(n)
        work = Work(self.pool, buf)  # clean: wait drops its reference
        fn(buf)
        return work.wait()

    def reduce_twice(self, n: int, fn: Callable[[CommBuffer], int]) -> int:
        buf = self.pool.acquire()  # clean: released in finally
        try:
            buf.write(n)
            first = fn(buf)
            self.pool.retain(buf)  # leak: a zero first pass returns with the second reference
            if first == 0:
                return 0
            second = fn(buf)
            self.pool.release(buf)
            return first + second
        finally:
            self.pool.release(buf)
