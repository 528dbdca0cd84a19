"""Cells: fixed pieces of memory that travel through the stages.

A cell is acquired by the source, passed from stage to stage and freed by whoever
consumes the sample.  Cells carry a reference count, since a sample may fan out.
"""
from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Optional


class LineClosed(Exception):
    pass


@dataclass(eq=False)
class Cell:
    bank: "CellBank"
    index: int
    refs: int = 0
    payload: Any = None
    notes: dict = field(default_factory=dict)

    def share(self) -> "Cell":
        if self.refs <= 0:
            raise RuntimeError("a free cell cannot be shared")
        self.refs += 1
        return self

    def free(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.bank._put_back(self)

    def __enter__(self) -> "Cell":
        return self

    def __exit__(self, *exc) -> None:
        self.free()


class CellBank:
    def __init__(self, count: int):
        self._free: list[Cell] = [Cell(self, i) for i in range(count)]
        self._wakeup: asyncio.Event = asyncio.Event()
        self.closed = False
        self.count = count

    async def acquire(self) -> Cell:
        while not self._free:
            if self.closed:
                raise LineClosed
            self._wakeup.clear()
            await self._wakeup.wait()
        cell = self._free.pop()  # clean: handed to the caller with one reference
        cell.refs = 1
        return cell

    def acquire_if_plenty(self, spare: int) -> Optional[Cell]:
        """Only when at least `spare` cells would remain."""
        if not self._free:
            return None
        cell = self._free.pop()  # leak: with too few remaining the popped cell is forgotten and None returned
        if len(self._free) < spare:
            return None
        cell.refs = 1
        return cell

    def _put_back(self, cell: Cell) -> None:
        cell.payload = None
        cell.notes.clear()
        self._free.append(cell)
        self._wakeup.set()

    def close(self) -> None:
        self.closed = True
        self._wakeup.set()
