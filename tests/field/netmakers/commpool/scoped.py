"""Per-group view of a RegisteredPool, with the sizes rounded for the group's chunking."""
from __future__ import annotations

import contextlib
from typing import Iterator

import torch

from .pool import RegBuf, RegisteredPool


class GroupBuffers:
    def __init__(self, pool: RegisteredPool, world: int) -> None:
        self.pool = pool
        self.world = world
        self.pinned: dict[str, RegBuf] = {}

    def _round(self, nbytes: int) -> int:
        unit = 256 * self.world
        return -(-nbytes // unit) * unit

    def borrow(self, nbytes: int) -> RegBuf | None:
        return self.pool.borrow(self._round(nbytes))  # clean: handed to the caller

    def repay(self, buf: RegBuf | None) -> None:
        if buf is not None:
            self.pool.repay(buf)

    def named(self, name: str, nbytes: int) -> RegBuf | None:
        """Long-lived buffer of a name, owned here until drop_named()."""
        buf = self.pinned.get(name)
        if buf is not None and buf.nbytes >= nbytes:
            return buf
        buf = self.borrow(nbytes)  # leak: a bigger buffer overwrites the smaller one of the same name
        if buf is not None:
            self.pinned[name] = buf
        return buf

    def drop_named(self) -> None:
        while self.pinned:
            self.repay(self.pinned.popitem()[1])

    def borrow_pair(self, nbytes: int) -> tuple[RegBuf, RegBuf] | None:
        a = self.borrow(nbytes)  # clean: near miss, repaid when there is no second one
        b = self.borrow(nbytes) if a is not None else None  # clean: returned with the first one
        if b is None:
            self.repay(a)
            return None
        return a, b

    @contextlib.contextmanager
    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor | None]:
        buf = self.borrow(torch.Size(shape).numel() * dtype.itemsize)  # clean: repaid in finally, repay takes None
        try:
            yield None if buf is None else buf.as_type(shape, dtype)
        finally:
            self.repay(buf)
