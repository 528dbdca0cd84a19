from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Iterator

import torch


@dataclass(eq=False)
class Region:
    arena: "Arena"
    start: int
    length: int

    @property
    def tensor(self) -> torch.Tensor:
        return self.arena.mem[self.start : self.start + self.length]


class Arena:
    """First fit over one tensor; holes are kept sorted and joined on the way back."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        self.mem = torch.empty(rows, width, device=device)
        self._holes: list[tuple[int, int]] = [(0, rows)]

    def place(self, length: int) -> Region | None:
        for i, (start, size) in enumerate(self._holes):
            if size >= length:
                if size == length:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + length, size - length)
                return Region(self, start, length)
        return None

    def lift(self, r: Region) -> None:
        holes = sorted(self._holes + [(r.start, r.length)])
        joined: list[tuple[int, int]] = []
        for start, size in holes:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._holes = joined


class ArenaSet:
    """One arena per device, tried in turn."""

    def __init__(self, arenas: list[Arena]) -> None:
        self.arenas = arenas

    def place(self, length: int, avoid: Arena | None = None) -> Region | None:
        for a in self.arenas:
            if a is avoid:
                continue
            r = a.place(length)  # clean: returned to the caller
            if r is not None:
                return r
        return None

    def place_mirrored(self, length: int) -> tuple[Region, Region] | None:
        first = self.place(length)  # clean: near miss, lifted when there is no second arena with room
        if first is None:
            return None
        second = self.place(length, avoid=first.arena)  # clean: returned with the first
        if second is None:
            first.arena.lift(first)
            return None
        return first, second

    def lift(self, *regions: Region) -> None:
        for r in regions:
            r.arena.lift(r)

    @contextlib.contextmanager
    def scratch(self, length: int) -> Iterator[torch.Tensor]:
        r = self.place(length)  # clean: lifted in finally
        if r is None:
            raise MemoryError(length)
        try:
            yield r.tensor
        finally:
            self.lift(r)
