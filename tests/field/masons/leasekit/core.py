from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType
from typing import Callable, Deque, Generic, Optional, Tuple, Type, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    def __init__(self, factory: Callable[[], T], limit: int, max_age: float = 300.0) -> None:
        self._factory = factory
        self._idle: Deque[Tuple[float, T]] = deque()
        self._permits = threading.Semaphore(limit)
        self._max_age = max_age

    def borrow(self, timeout: Optional[float] = None) -> Optional[T]:
        if not self._permits.acquire(timeout=timeout):  # clean: near miss, the permit goes with the item until repay
            return None
        if self._idle:
            return self._idle.pop()[1]
        return self._factory()

    def borrow_fresh(self, timeout: Optional[float] = None) -> Optional[T]:
        if not self._permits.acquire(timeout=timeout):  # leak: None for an over-aged idle item keeps the permit
            return None
        if not self._idle:
            return self._factory()
        born, item = self._idle.pop()
        if time.monotonic() - born > self._max_age:
            return None
        return item

    def repay(self, item: T) -> None:
        self._idle.append((time.monotonic(), item))
        self._permits.release()

    def scrap(self, item: T) -> None:
        del item
        self._permits.release()

    def lease(self, timeout: Optional[float] = None) -> "Lease[T]":
        return Lease(self, timeout)


class Lease(Generic[T]):
    def __init__(self, pool: Pool[T], timeout: Optional[float]) -> None:
        self.pool = pool
        self.timeout = timeout
        self.item: Optional[T] = None
        self.kept = False

    def keep(self) -> Optional[T]:
        self.kept = True
        return self.item

    def __enter__(self) -> "Lease[T]":
        self.item = self.pool.borrow(self.timeout)  # clean: near miss, __exit__ repays unless keep() has handed it on
        return self

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        if self.kept or self.item is None:
            return
        if et is not None:
            self.pool.scrap(self.item)
        else:
            self.pool.repay(self.item)
        self.item = None
