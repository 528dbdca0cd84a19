"""Shared-memory segments, by a fixed number of numbered cells."""
from __future__ import annotations

import mmap
import os
import threading
from typing import Optional


class Segment:
    """One cell. `retain` and `drop` count its holders; the last drop makes the cell vacant."""

    def __init__(self, board: "SegmentBoard", cell: int, memory: mmap.mmap) -> None:
        self.board = board
        self.cell = cell
        self.memory = memory
        self.holders = 0
        self.filled = 0

    def retain(self) -> "Segment":
        with self.board.mu:
            self.holders += 1
        return self

    def drop(self) -> None:
        with self.board.mu:
            self.holders -= 1
            if self.holders == 0:
                self.filled = 0
                self.board.vacant.append(self.cell)

    def write(self, data: bytes) -> bool:
        if self.filled + len(data) > len(self.memory):
            return False
        self.memory[self.filled:self.filled + len(data)] = data
        self.filled += len(data)
        return True

    def read(self) -> bytes:
        return self.memory[:self.filled]


class SegmentBoard:
    def __init__(self, directory: str, cells: int, size: int) -> None:
        self.mu = threading.RLock()
        self.vacant = list(range(cells))
        self.segments: list[Segment] = []
        for cell in range(cells):
            f = open(os.path.join(directory, f"cell{cell}"), "w+b")  # clean: closed once it is mapped
            f.truncate(size)
            self.segments.append(Segment(self, cell, mmap.mmap(f.fileno(), size)))
            f.close()

    def close(self) -> None:
        for segment in self.segments:
            segment.memory.close()
        self.segments.clear()

    def map_segment(self) -> Optional[Segment]:
        """A vacant segment with one holder, the caller."""
        with self.mu:
            if not self.vacant:
                return None
            segment = self.segments[self.vacant.pop()]
            return segment.retain()  # clean: handed to the caller

    def map_run(self, count: int) -> Optional[list[Segment]]:
        """As many segments as asked for, or None."""
        run: list[Segment] = []
        for _ in range(count):
            segment = self.map_segment()  # leak: a run cut short drops the list, not its segments
            if segment is None:
                return None
            run.append(segment)
        return run
