"""Three layers of allocation helpers, as they grow in real trees."""
from typing import Callable, Optional


class RawPool:
    def __init__(self) -> None:
        self.slabs: list = []

    def raw_alloc(self) -> bytearray:
        return self.slabs.pop() if self.slabs else bytearray(64)

    def raw_free(self, slab: bytearray) -> None:
        self.slabs.append(slab)


class CountingPool:
    """Counts what is out."""

    def __init__(self, inner: RawPool) -> None:
        self.inner = inner
        self.out = 0

    def get_slab(self) -> bytearray:
        slab = self.inner.raw_alloc()  # clean: the wrapper's own body, handed on
        self.out += 1
        return slab

    def put_slab(self, slab: bytearray) -> None:
        self.out -= 1
        self.inner.raw_free(slab)


class LimitedPool:
    """At most `limit` are out; None beyond."""

    def __init__(self, inner: CountingPool, limit: int) -> None:
        self.inner = inner
        self.limit = limit

    def try_slab(self) -> Optional[bytearray]:
        slab = self.inner.get_slab()  # clean: near miss, put back when over the limit, else handed on
        if self.inner.out > self.limit:
            self.inner.put_slab(slab)
            return None
        return slab

    def try_slab_zeroed(self) -> Optional[bytearray]:
        slab = self.try_slab()  # clean: near miss, none or handed on
        if slab is None:
            return None
        slab[:] = bytes(len(slab))
        return slab

    def finish(self, slab: bytearray) -> None:
        self.inner.put_slab(slab)


def use(pool: LimitedPool, fn: Callable[[bytearray], int]) -> int:
    slab = pool.try_slab_zeroed()  # clean: near miss, finished in finally when not none
    if slab is None:
        return -1
    try:
        return fn(slab)
    finally:
        pool.finish(slab)


def use_first(pool: LimitedPool, fn: Callable[[bytearray], int]) -> int:
    slab = pool.try_slab_zeroed()  # leak: a negative result is turned into zero without finish
    if slab is None:
        return -1
    result = fn(slab)
    if result < 0:
        return 0
    pool.finish(slab)
    return result


def size_of(pool: LimitedPool) -> int:
    slab = pool.try_slab()  # leak: only measured
    return len(slab) if slab is not None else 0


def size_of_properly(pool: LimitedPool) -> int:
    slab = pool.try_slab()  # clean: near miss, walks through finish before the return
    size = 0
    if slab is not None:
        size = len(slab)
        pool.finish(slab)
    return size


def snapshot(pool: CountingPool) -> bytes:
    return bytes(pool.get_slab())  # leak: copied and dropped


def exchange(pool: CountingPool, old: bytearray) -> bytearray:
    new = pool.get_slab()  # clean: near miss, returned while the argument is put back
    new[:] = old
    pool.put_slab(old)
    return new


def compact(pool: CountingPool, rounds: int) -> int:
    slab = pool.get_slab()  # clean: near miss, exchange puts it back and gives another
    for _ in range(rounds):
        slab = exchange(pool, slab)  # clean: near miss, exchanged in turn or put back at the end
    total = sum(slab)
    pool.put_slab(slab)
    return total


def compact_once(pool: CountingPool) -> int:
    slab = pool.get_slab()  # clean: given to exchange, which puts it back
    exchange(pool, slab)  # leak: the new slab is dropped
    return pool.out
