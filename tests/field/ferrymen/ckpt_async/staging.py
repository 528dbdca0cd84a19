"""Pinned host staging memory, cut into regions."""
from __future__ import annotations

import bisect
import contextlib
import threading
from typing import Iterator, Optional

import torch


class Region:
    """A piece of the arena. `free()` gives it back, and may be called from any thread."""

    __slots__ = ("arena", "start", "size", "live")

    def __init__(self, arena: "StagingArena", start: int, size: int) -> None:
        self.arena, self.start, self.size, self.live = arena, start, size, True

    def view(self) -> torch.Tensor:
        return self.arena.memory[self.start:self.start + self.size]

    def free(self) -> None:
        if self.live:
            self.live = False
            self.arena._put(self.start, self.size)


class StagingArena:
    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._holes: list[tuple[int, int]] = [(0, nbytes)]
        self._cv = threading.Condition()

    def _fit(self, size: int) -> Optional[int]:
        for i, (start, length) in enumerate(self._holes):
            if length >= size:
                if length == size:
                    del self._holes[i]
                else:
                    self._holes[i] = (start + size, length - size)
                return start
        return None

    def reserve(self, size: int, timeout: Optional[float] = None) -> Optional[Region]:
        """A region of `size` bytes; None after the timeout."""
        with self._cv:
            start = self._fit(size)
            while start is None:
                if not self._cv.wait(timeout):
                    return None
                start = self._fit(size)
        return Region(self, start, size)

    def _put(self, start: int, size: int) -> None:
        with self._cv:
            i = bisect.bisect(self._holes, (start, size))
            self._holes.insert(i, (start, size))
            merged: list[tuple[int, int]] = []
            for s, n in self._holes:
                if merged and sum(merged[-1]) == s:
                    merged[-1] = (merged[-1][0], merged[-1][1] + n)
                else:
                    merged.append((s, n))
            self._holes = merged
            self._cv.notify_all()


@contextlib.contextmanager
def staged(arena: StagingArena, tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a device tensor, for the length of the block."""
    region = arena.reserve(tensor.numel() * tensor.element_size())  # clean: freed in finally
    try:
        region.view().copy_(tensor.contiguous().view(torch.uint8).reshape(-1), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        yield memoryview(region.view().numpy())
    finally:
        region.free()


def stage_copy(arena: StagingArena, tensor: torch.Tensor, timeout: float) -> Optional[Region]:
    region = arena.reserve(tensor.numel() * tensor.element_size(), timeout)  # clean: the caller's, or None
    if region is not None:
        region.view().copy_(tensor.contiguous().view(torch.uint8).reshape(-1), non_blocking=True)
    return region
