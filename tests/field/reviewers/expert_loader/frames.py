"""Device frames. A frame is pinned by its users; at zero pins it can be reused."""
from __future__ import annotations

import torch


class Frame:
    def __init__(self, index: int, weight: torch.Tensor):
        self.index = index
        self.weight = weight
        self.pins = 0
        self.expert = -1


class FrameCache:
    def __init__(self, count: int, dim: int):
        self.frames = [Frame(i, torch.zeros(dim, dim)) for i in range(count)]
        self.by_expert: dict[int, Frame] = {}

    def pin(self, expert: int) -> Frame | None:
        """Pin the frame of a resident expert; pair with unpin()."""
        frame = self.by_expert.get(expert)
        if frame is None:
            return None
        frame.pins += 1
        return frame

    def pin_empty(self, expert: int) -> Frame | None:
        """Pin an unused frame for an expert which is to be loaded."""
        for frame in self.frames:
            if frame.pins == 0:
                self.by_expert.pop(frame.expert, None)
                frame.expert = expert
                frame.pins = 1
                self.by_expert[expert] = frame
                return frame
        return None

    def unpin(self, frame: Frame) -> None:
        frame.pins -= 1


class StreamPool:
    """Copy lanes, by number."""

    def __init__(self, lanes: int):
        self._lanes = set(range(lanes))

    def enter_lane(self) -> int | None:
        return self._lanes.pop() if self._lanes else None  # clean: returned to the caller

    def leave_lane(self, lane: int) -> None:
        self._lanes.add(lane)
