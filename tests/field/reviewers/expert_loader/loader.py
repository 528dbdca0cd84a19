"""Loading experts into frames."""
from __future__ import annotations

import torch

from .frames import Frame, FrameCache, StreamPool


class ExpertLoader:
    def __init__(self, cache: FrameCache, lanes: StreamPool, host: dict[int, torch.Tensor]):
        self.cache = cache
        self.lanes = lanes
        self.host = host

    def ensure(self, expert: int) -> Frame | None:
        """A pinned frame with the expert's weight; the caller unpins it."""
        frame = self.cache.pin(expert)  # clean: near miss, the hit goes straight to the caller
        if frame is not None:
            return frame
        weight = self.host.get(expert)
        if weight is None:
            return None
        frame = self.cache.pin_empty(expert)  # clean: near miss, unpinned when no lane is open, else returned
        if frame is None:
            return None
        lane = self.lanes.enter_lane()  # clean: left after the copy
        if lane is None:
            self.cache.by_expert.pop(expert, None)
            frame.expert = -1
            self.cache.unpin(frame)
            return None
        frame.weight.copy_(weight)
        self.lanes.leave_lane(lane)
        return frame

    def prefetch(self, experts: list[int]) -> int:
        loaded = 0
        for e in experts:
            frame = self.ensure(e)  # clean: unpinned again, the weight stays resident
            if frame is None:
                continue
            loaded += 1
            self.cache.unpin(frame)
        return loaded

    def preload(self, experts: list[int]) -> int:
        loaded = 0
        for e in experts:
            if self.ensure(e) is not None:  # leak: the pinned frame is only compared with None and never unpinned
                loaded += 1
        return loaded

    def refresh(self, expert: int) -> bool:
        frame = self.cache.pin(expert)  # leak: without a host weight the pin is kept
        if frame is None:
            return False
        weight = self.host.get(expert)
        if weight is None:
            return False
        lane = self.lanes.enter_lane()  # clean: near miss, the copy is made with or without a lane and only a real one is left
        frame.weight.copy_(weight)
        if lane is not None:
            self.lanes.leave_lane(lane)
        self.cache.unpin(frame)
        return True

    def spill(self, experts: list[int]) -> int:
        n = 0
        lane = self.lanes.enter_lane()  # leak: a missing expert ends the spill inside the loop without leave_lane()
        if lane is None:
            return 0
        for e in experts:
            frame = self.cache.pin(e)  # clean: unpinned in the same round
            if frame is None:
                return n
            self.host[e] = frame.weight.clone()
            self.cache.unpin(frame)
            n += 1
        self.lanes.leave_lane(lane)
        return n
