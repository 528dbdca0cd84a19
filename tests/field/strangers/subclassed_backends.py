"""Template methods: the base class drives, backends say how a page is got."""
from __future__ import annotations

import abc
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(abc.ABC, Generic[T]):
    @abc.abstractmethod
    def acquire(self) -> T:
        raise NotImplementedError

    @abc.abstractmethod
    def release(self, item: T) -> None:
        raise NotImplementedError


class PagePool(Pool[int]):
    def __init__(self, n: int) -> None:
        self.items = list(range(n))

    def acquire(self) -> int:
        return self.items.pop()

    def release(self, item: int) -> None:
        self.items.append(item)


class Runner(abc.ABC):
    def __init__(self, pool: Pool[int]) -> None:
        self.pool = pool

    def run(self, job: bytes) -> int:
        page = self.setup()  # clean: near miss, template method with finally
        try:
            return self.execute(job, page)
        finally:
            self.teardown(page)

    def run_if(self, job: bytes) -> int:
        page = self.setup()  # leak: an empty job returns before the try
        if not job:
            return 0
        try:
            return self.execute(job, page)
        finally:
            self.teardown(page)

    @abc.abstractmethod
    def setup(self) -> int: ...

    @abc.abstractmethod
    def execute(self, job: bytes, page: int) -> int: ...

    @abc.abstractmethod
    def teardown(self, page: int) -> None: ...


class LocalRunner(Runner):
    def setup(self) -> int:
        return self.pool.acquire()  # clean: handed to run

    def execute(self, job: bytes, page: int) -> int:
        return len(job) + page

    def teardown(self, page: int) -> None:
        self.pool.release(page)


class PairRunner(LocalRunner):
    def execute(self, job: bytes, page: int) -> int:
        second = self.pool.acquire()  # clean: near miss, released on the short and the long way
        if len(job) < 2:
            self.pool.release(second)
            return page
        result = page + second
        self.pool.release(second)
        return result


class TripleRunner(LocalRunner):
    def execute(self, job: bytes, page: int) -> int:
        second = self.pool.acquire()  # clean: released last
        third = self.pool.acquire()  # leak: the odd branch releases only the second one
        if len(job) % 2:
            self.pool.release(second)
            return page
        result = page + second + third
        self.pool.release(third)
        self.pool.release(second)
        return result
