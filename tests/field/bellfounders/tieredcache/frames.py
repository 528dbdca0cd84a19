"""Device frames. A frame is counted: `count` users keep it from going back to the list."""
from __future__ import annotations

from contextlib import contextmanager

import torch


class Frame:
    __slots__ = ("no", "data", "count", "home")

    def __init__(self, no: int, data: torch.Tensor, home: "FramePool"):
        self.no = no
        self.data = data
        self.count = 0
        self.home = home

    def retain(self) -> "Frame":
        self.count += 1
        return self

    def forget(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.home._idle.append(self)


class FramePool:
    def __init__(self, n: int, shape: tuple, device: str = "cuda"):
        slab = torch.empty((n, *shape), device=device)
        self._idle = [Frame(i, slab[i], self) for i in range(n)]
        self.low_water = max(1, n // 16)

    def fresh(self) -> Frame | None:
        if not self._idle:
            return None
        return self._idle.pop().retain()  # clean: handed to the caller

    def fresh_above_water(self) -> Frame | None:
        """For speculative loads: never digs into the reserve."""
        frame = self.fresh()  # leak: not forgotten when only the reserve is left
        if frame is None or len(self._idle) < self.low_water:
            return None
        return frame

    @contextmanager
    def scratch(self):
        frame = self.fresh()  # clean: forgotten in finally
        try:
            yield frame.data if frame is not None else None
        finally:
            if frame is not None:
                frame.forget()

    def headroom(self) -> int:
        return len(self._idle)
