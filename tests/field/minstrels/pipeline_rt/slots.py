"""Activation slots of one pipeline stage, and the small integers that serve as message tags."""
import threading

import torch


class NoSlot(Exception):
    pass


class ActSlot:
    __slots__ = ("idx", "data", "mb", "grad")

    def __init__(self, idx, shape, dtype, device):
        self.idx = idx
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self.mb = -1
        self.grad = None


class SlotPool:
    def __init__(self, n, shape, dtype, device):
        self._free = [ActSlot(i, shape, dtype, device) for i in range(n)]
        self._busy = {}
        self._cv = threading.Condition()

    def claim(self, mb, timeout=30.0):
        with self._cv:
            if not self._cv.wait_for(lambda: self._free, timeout):
                raise NoSlot("microbatch %d, %d slots busy" % (mb, len(self._busy)))
            slot = self._free.pop()  # clean: handed to the caller and booked as busy
            slot.mb = mb
            self._busy[slot.idx] = slot
            return slot

    def claim_or_none(self, mb):
        with self._cv:
            if not self._free:
                return None
            slot = self._free.pop()  # clean: handed to the caller and booked as busy
            slot.mb = mb
            self._busy[slot.idx] = slot
            return slot

    def unclaim(self, slot):
        with self._cv:
            self._busy.pop(slot.idx)
            slot.grad = None
            self._free.append(slot)
            self._cv.notify()


class TagSpace:
    """Tags 1..n. The transport matches messages by tag, so a tag must not be used twice at a time."""

    def __init__(self, n):
        self._tags = list(range(1, n + 1))
        self._lock = threading.Lock()

    def lease(self):
        with self._lock:
            if not self._tags:
                raise NoSlot("no message tag left")
            return self._tags.pop()  # clean: handed to the caller

    def lease_even(self):
        """Even tags go to the gradient direction on some transports."""
        with self._lock:
            while self._tags:
                t = self._tags.pop()  # leak: the odd tags on the way to an even one are thrown away
                if t % 2 == 0:
                    return t
        raise NoSlot("no even message tag left")

    def back(self, tag):
        with self._lock:
            self._tags.append(tag)
