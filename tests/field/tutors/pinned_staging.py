"""Pinned host slabs for asynchronous host-to-device copies."""
from __future__ import annotations

import contextlib
import threading
from typing import Iterator, Optional

import torch


class SlabBoard:
    """Equal pinned slabs; a bool tensor marks the busy ones."""

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self._mem = torch.empty(slabs, slab_bytes, dtype=torch.uint8)
        self._busy = torch.zeros(slabs, dtype=torch.bool)
        self._mutex = threading.Lock()

    def occupy(self) -> int:
        """Index of a slab now busy, or -1."""
        with self._mutex:
            idle = (~self._busy).nonzero()
            if idle.numel() == 0:
                return -1
            index = int(idle[0])
            self._busy[index] = True
            return index

    def vacate(self, index: int) -> None:
        with self._mutex:
            self._busy[index] = False

    def view(self, index: int) -> torch.Tensor:
        return self._mem[index]

    @contextlib.contextmanager
    def visit(self) -> Iterator[Optional[torch.Tensor]]:
        index = self.occupy()  # clean: near miss, yields None only when nothing was occupied
        if index < 0:
            yield None
            return
        try:
            yield self.view(index)
        finally:
            self.vacate(index)


class StagedWrite:
    """One slab for the length of a with block."""

    def __init__(self, board: SlabBoard) -> None:
        self.board = board
        self.index = -1
        self.written = 0

    def __enter__(self) -> "StagedWrite":
        self.index = self.board.occupy()  # leak: __exit__ returns early when nothing was written
        return self

    def put(self, chunk: torch.Tensor) -> None:
        view = self.board.view(self.index)
        view[self.written : self.written + chunk.numel()].copy_(chunk)
        self.written += chunk.numel()

    def __exit__(self, *exc: object) -> bool:
        if self.written == 0:
            return False
        self.board.vacate(self.index)
        self.index = -1
        return False


class StagedRead:
    """Like StagedWrite, for device-to-host copies."""

    def __init__(self, board: SlabBoard) -> None:
        self.board = board
        self.index = -1

    def __enter__(self) -> "StagedRead":
        self.index = self.board.occupy()  # clean: near miss, early return in __exit__ is the empty-handed case
        return self

    def __exit__(self, *exc: object) -> bool:
        if self.index < 0:
            return False
        self.board.vacate(self.index)
        self.index = -1
        return False


class CopyEngine:
    """Copies weights and caches through the board."""

    def __init__(self, board: SlabBoard) -> None:
        self.board = board
        self.in_flight: list[tuple[torch.cuda.Event, int]] = []

    def upload(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        index = self.board.occupy()  # clean: parked in in_flight, reap vacates it
        if index < 0:
            return False
        self.board.view(index)[: src.numel()].copy_(src)
        dst.copy_(self.board.view(index)[: src.numel()], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.in_flight.append((event, index))
        return True

    def reap(self) -> None:
        pending = []
        for event, index in self.in_flight:
            if event.query():
                self.board.vacate(index)
            else:
                pending.append((event, index))
        self.in_flight = pending

    def upload_now(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        with self.board.visit() as view:  # clean: visit vacates
            if view is None:
                return False
            view[: src.numel()].copy_(src)
            dst.copy_(view[: src.numel()])
            return True

    def double_buffer(self, parts: list[torch.Tensor], dst: torch.Tensor) -> bool:
        front = self.board.occupy()  # leak: stays busy when no back slab is found
        if front < 0:
            return False
        back = self.board.occupy()  # clean: vacated after the loop
        if back < 0:
            return False
        for step, part in enumerate(parts):
            slab = front if step % 2 == 0 else back
            self.board.view(slab)[: part.numel()].copy_(part)
            dst[step].copy_(self.board.view(slab)[: part.numel()])
        self.board.vacate(front)
        self.board.vacate(back)
        return True

    def mirror(self, src: torch.Tensor) -> Optional[tuple[int, int]]:
        first = self.board.occupy()  # clean: near miss, vacated when the second is refused
        if first < 0:
            return None
        second = self.board.occupy()  # clean: both indices go to the caller
        if second < 0:
            self.board.vacate(first)
            return None
        return first, second

    def checksum(self, src: torch.Tensor) -> int:
        index = self.board.occupy()  # leak: a slab of index 0 is treated as none
        if not index or index < 0:
            return int(src.sum())
        self.board.view(index)[: src.numel()].copy_(src)
        total = int(self.board.view(index)[: src.numel()].sum())
        self.board.vacate(index)
        return total
