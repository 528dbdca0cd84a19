from __future__ import annotations

from typing import Callable

from .buffers import Flat


class Handle:
    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.finished = False
        self._callbacks: list[Callable[["Handle"], None]] = []

    def add_done_callback(self, fn: Callable[["Handle"], None]) -> None:
        self._callbacks.append(fn)

    def wait(self) -> Flat:
        if not self.finished:
            self.finished = True
            for fn in self._callbacks:
                fn(self)
        return self.flat


class LoopbackGroup:
    """One-rank process group for tests and single-GPU runs."""

    def __init__(self, world: int = 1) -> None:
        self.world = world
        self.outstanding: list[Handle] = []

    def all_reduce(self, flat: Flat) -> Handle:
        handle = Handle(flat)
        self.outstanding.append(handle)
        return handle

    def barrier(self) -> None:
        while self.outstanding:
            self.outstanding.pop(0).wait()
