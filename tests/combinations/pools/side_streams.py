# take: P.lane()
# give: P.leave(X)
# gets: value
# type: StreamLanes
import torch

MAX_LANES = 32


class StreamLanes:
    __slots__ = ("_device", "_parked", "_made", "_priority")

    def __init__(self, device=None, priority=-1):
        self._device = device
        self._priority = priority
        self._parked = []
        self._made = 0

    def _new_stream(self):
        if self._made >= MAX_LANES:
            raise RuntimeError("too many side streams are out; somebody forgot leave()")
        s = torch.cuda.Stream(device=self._device, priority=self._priority)
        self._made += 1
        return s

    def lane(self):
        return self._parked.pop() if self._parked else self._new_stream()

    def leave(self, stream):
        # LIFO keeps the hot stream hot
        self._parked.append(stream)
