"""Output memory. A slab has room for one batch and is counted, since answers refer to it."""
from __future__ import annotations

import asyncio

import numpy as np


class Slab:
    __slots__ = ("sid", "array", "users")

    def __init__(self, sid: int, rows: int, dim: int):
        self.sid = sid
        self.array = np.empty((rows, dim), np.float32)
        self.users = 0


class SlabPool:
    def __init__(self, count: int, rows: int, dim: int):
        self.rows, self.dim = rows, dim
        self._free = [Slab(i, rows, dim) for i in range(count)]
        self._some = asyncio.Event()
        self.rented = 0

    def _take(self) -> Slab:
        slab = self._free.pop()  # clean: handed to the caller with one user
        slab.users = 1
        self.rented += 1
        return slab

    async def rent(self) -> Slab:
        while not self._free:
            self._some.clear()
            await self._some.wait()
        return self._take()  # clean: handed to the caller

    def rent_nowait(self) -> Slab | None:
        return self._take() if self._free else None  # clean: handed to the caller

    def hold(self, slab: Slab) -> Slab:
        slab.users += 1
        return slab

    def drop(self, slab: Slab) -> None:
        slab.users -= 1
        if slab.users == 0:
            self._free.append(slab)
            self._some.set()


class Result:
    """Rows lo to hi of a slab; whoever has it calls release()."""

    def __init__(self, pool: SlabPool, slab: Slab, lo: int, hi: int):
        self._pool, self._slab = pool, slab
        self.lo, self.hi = lo, hi

    def rows(self) -> np.ndarray:
        if self._slab is None:
            raise RuntimeError("result was released")
        return self._slab.array[self.lo:self.hi]

    def release(self) -> None:
        slab, self._slab = self._slab, None
        if slab is not None:
            self._pool.drop(slab)
