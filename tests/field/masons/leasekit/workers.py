from __future__ import annotations

from typing import Callable, Generic, List, Optional, TypeVar

from .core import Pool

T = TypeVar("T")
R = TypeVar("R")


class WarmWorkers(Generic[T]):
    def __init__(self, pool: Pool[T]) -> None:
        self.pool = pool
        self.primary: Optional[T] = None
        self.spares: List[T] = []

    def promote(self) -> bool:
        with self.pool.lease(timeout=1.0) as lease:  # clean: near miss, repaid by the lease unless keep() moved it to primary
            if lease.item is None:
                return False
            if self.primary is not None:
                self.pool.repay(self.primary)
            self.primary = lease.keep()  # clean: near miss, kept from the lease, the former primary was repaid
        return True

    def add_spares(self, n: int) -> int:
        for _ in range(n):
            item = self.pool.borrow(timeout=0.0)  # leak: stop() repays the primary only
            if item is None:
                break
            self.spares.append(item)
        return len(self.spares)

    def run(self, fn: Callable[[T], R]) -> Optional[R]:
        item = self.primary if self.primary is not None else self.pool.borrow(timeout=1.0)  # leak: a borrowed one is repaid only if there is a primary
        if item is None:
            return None
        result = fn(item)
        if self.primary is not None and item is not self.primary:
            self.pool.repay(item)
        return result

    def run_safe(self, fn: Callable[[T], R]) -> Optional[R]:
        with self.pool.lease(timeout=1.0) as lease:  # clean: the lease repays at the end of the block
            if lease.item is None:
                return None
            return fn(lease.item)

    def try_run(self, fn: Callable[[T], R]) -> Optional[R]:
        item = self.pool.borrow(timeout=0.0)  # clean: near miss, scrapped by the handler, repaid otherwise
        if item is None:
            return None
        try:
            result = fn(item)
        except ValueError:
            self.pool.scrap(item)
            return None
        self.pool.repay(item)
        return result

    def stop(self) -> None:
        if self.primary is not None:
            self.pool.repay(self.primary)
            self.primary = None
