"""Activation offload: pinned host slots, copy streams and a prefetching backward."""
from __future__ import annotations

import threading


class PinnedSlot:
    def __init__(self, index, nbytes):
        self.index = index
        self.nbytes = nbytes
        self.owner = None


class PinnedArena:
    def __init__(self, count, nbytes):
        self._slots = [PinnedSlot(i, nbytes) for i in range(count)]
        self._cv = threading.Condition()

    def checkout(self, owner, block=True):
        with self._cv:
            while not self._slots:
                if not block:
                    return None
                self._cv.wait()
            slot = self._slots.pop()  # clean: handed to the caller
            slot.owner = owner
            return slot

    def checkin(self, slot):
        with self._cv:
            slot.owner = None
            self._slots.append(slot)
            self._cv.notify()


class CopyStream:
    def __init__(self):
        self.log = []

    def d2h(self, tensor, slot):
        if tensor.nbytes > slot.nbytes:
            return False
        self.log.append(("d2h", slot.index))
        return True

    def h2d(self, slot):
        self.log.append(("h2d", slot.index))
        return slot.index


class ActivationStore:
    """Saved activations of one step, by (layer, microbatch)."""

    def __init__(self, arena, stream):
        self.arena = arena
        self.stream = stream
        self.saved = {}
        self.prefetched = {}

    def offload(self, key, tensor):
        slot = self.arena.checkout(key)  # leak: a failed copy returns False without the checkin
        if not self.stream.d2h(tensor, slot):
            return False
        prev = self.saved.pop(key, None)
        if prev is not None:
            self.arena.checkin(prev)
        self.saved[key] = slot
        return True

    def reload(self, key):
        slot = self.saved.pop(key)
        value = self.stream.h2d(slot)
        self.arena.checkin(slot)
        return value

    def offload_if_large(self, key, tensor, threshold):
        slot = self.arena.checkout(key, block=False)  # clean: near miss, small tensors check it in, large ones are saved
        if slot is None:
            return tensor
        if tensor.nbytes < threshold or key in self.saved:
            self.arena.checkin(slot)
            return tensor
        self.stream.d2h(tensor, slot)
        self.saved[key] = slot
        return None

    def prefetch(self, key):
        bounce = self.arena.checkout(("bounce", key), block=False)  # leak: self.prefetched is only cleared, its slots are not checked in
        if bounce is None:
            return
        self.prefetched[key] = bounce

    def end_step(self):
        for slot in self.saved.values():
            self.arena.checkin(slot)
        self.saved.clear()
        self.prefetched.clear()


class OptimizerOffload:
    def __init__(self, arena, stream, pin_params):
        self.arena = arena
        self.stream = stream
        self.pin_params = pin_params

    def step(self, params):
        n = 0
        for p in params:
            slot = self.arena.checkout(p.name)  # leak: parameters without grad skip the checkin
            if p.grad is None:
                continue
            self.stream.d2h(p, slot)
            n += 1
            self.arena.checkin(slot)
        return n

    def step_fused(self, params):
        taken = []
        try:
            for p in params:
                slot = self.arena.checkout(p.name, block=False)  # clean: near miss, the early return passes through the finally
                if slot is None:
                    return False
                taken.append(slot)
            for p, slot in zip(params, taken):
                self.stream.d2h(p, slot)
            return True
        finally:
            for slot in taken:
                self.arena.checkin(slot)

    def clip(self, params, limit):
        slot = None
        if self.pin_params:
            slot = self.arena.checkout("clip")  # clean: near miss, released under the test that acquired it
        total = sum(p.nbytes for p in params)
        if self.pin_params:
            self.arena.checkin(slot)
        return min(total, limit)

    def reduce(self, params, mode):
        slot = self.arena.checkout("reduce")  # leak: checked in for sum and mean only
        total = sum(p.nbytes for p in params)
        if mode == "sum":
            self.arena.checkin(slot)
        elif mode == "mean":
            total /= max(1, len(params))
            self.arena.checkin(slot)
        return total


def stage_batch(arena, stream, tensors):
    staged = []
    for t in tensors:
        slot = arena.checkout(t.name)  # clean: returned to the caller in the list
        stream.d2h(t, slot)
        staged.append(slot)
    return staged


def evaluate(arena, stream, tensors, limit):
    staged = stage_batch(arena, stream, tensors)  # leak: only the first limit slots are checked in
    scores = [stream.h2d(s) for s in staged]
    for s in staged[:limit]:
        arena.checkin(s)
    return sum(scores)


def validate(arena, stream, tensors):
    staged = stage_batch(arena, stream, tensors)  # clean: all checked in, whether or not there are scores
    scores = [stream.h2d(s) for s in staged]
    for s in staged:
        arena.checkin(s)
    if not scores:
        return None
    return sum(scores)


def double_buffer(arena, stream, tensors):
    cur = None
    for t in tensors:
        nxt = arena.checkout(t.name)  # clean: near miss, it becomes cur and goes back one turn later
        stream.d2h(t, nxt)
        if cur is not None:
            stream.h2d(cur)
            arena.checkin(cur)
        cur = nxt
    if cur is not None:
        stream.h2d(cur)
        arena.checkin(cur)
