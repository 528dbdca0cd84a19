"""Communication lanes: a fixed count of tensors with integer tags."""
import threading

import torch


class Lane:
    def __init__(self, tag, numel):
        self.tag = tag
        self.mem = torch.empty(numel)

    def shaped(self, shape):
        return self.mem[: shape.numel()].view(shape)


class LaneYard:
    def __init__(self, lanes, numel):
        self.parked = {i: Lane(i, numel) for i in range(lanes)}
        self.cv = threading.Condition()

    def enter(self):
        with self.cv:
            self.cv.wait_for(lambda: self.parked)
            tag, lane = self.parked.popitem()  # clean: handed to the caller
            return lane

    def enter_now(self):
        with self.cv:
            if not self.parked:
                return None
            return self.parked.popitem()[1]  # clean: handed to the caller

    def enter_tag(self, tag):
        with self.cv:
            return self.parked.pop(tag, None)  # clean: handed to the caller, or None

    def leave(self, lane):
        with self.cv:
            self.parked[lane.tag] = lane
            self.cv.notify()

    def enter_all(self, tags):
        """All lanes named, or None with the yard unchanged."""
        got = []
        for tag in tags:
            lane = self.enter_tag(tag)  # leak: when a later tag is absent the lanes gathered before are lost
            if lane is None:
                return None
            got.append(lane)
        return got


class LaneGuard:
    """Context manager around one lane."""

    def __init__(self, yard):
        self.yard = yard
        self.lane = None

    def __enter__(self):
        self.lane = self.yard.enter()  # clean: near miss, the exit leaves unless the lane was detached
        return self

    def detach(self):
        lane, self.lane = self.lane, None
        return lane

    def __exit__(self, *exc):
        if self.lane is None:
            return
        self.yard.leave(self.lane)
        self.lane = None
