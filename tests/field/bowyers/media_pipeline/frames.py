"""Frame surfaces: fixed number of decoded pictures, reference counted."""
from __future__ import annotations

import threading
from typing import Iterator, Optional

import torch


class Surface:
    __slots__ = ("pixels", "pts", "refs", "slot")

    def __init__(self, slot: int, height: int, width: int) -> None:
        self.slot = slot
        self.pixels = torch.empty((3, height, width), dtype=torch.uint8)
        self.pts = 0
        self.refs = 0


class SurfacePool:
    def __init__(self, count: int, height: int, width: int) -> None:
        self._idle = [Surface(i, height, width) for i in range(count)]
        self._cv = threading.Condition()

    def obtain(self, wait: float = 0.0) -> Optional[Surface]:
        with self._cv:
            if not self._idle and wait:
                self._cv.wait(wait)
            if not self._idle:
                return None
            surface = self._idle.pop()
            surface.refs = 1
            return surface

    def add_ref(self, surface: Surface) -> Surface:
        with self._cv:
            surface.refs += 1
        return surface

    def unref(self, surface: Surface) -> None:
        with self._cv:
            surface.refs -= 1
            if surface.refs == 0:
                self._idle.append(surface)
                self._cv.notify()

    def obtain_many(self, n: int) -> list[Surface]:
        """n surfaces or none."""
        got: list[Surface] = []
        for _ in range(n):
            s = self.obtain()  # clean: rolled back when short, else handed to the caller
            if s is None:
                for taken in got:
                    self.unref(taken)
                return []
            got.append(s)
        return got

    def obtain_up_to(self, n: int) -> Iterator[Surface]:
        for _ in range(n):
            s = self.obtain()  # clean: handed to the receiver of the yield
            if s is None:
                return
            yield s
