"""Trajectory mail between actors and the learner in one shared-memory segment."""
import contextlib
import struct
import threading
import time
import weakref
from collections import deque
from multiprocessing import shared_memory

import numpy as np

HEADER = struct.Struct("<IIHH")


class SegmentFull(Exception): ...
class Torn(Exception): ...


class View:
    __slots__ = ("ring", "idx", "seq", "__weakref__")

    def __init__(self, ring, idx, seq):
        self.ring, self.idx, self.seq = ring, idx, seq

    def array(self):
        raw = self.ring.raw(self.idx)
        _, n, _, _ = HEADER.unpack_from(raw)
        return np.frombuffer(raw, np.uint8, n, HEADER.size)

    def unpin(self):
        self.ring.unref(self.idx)

    close = unpin


class SlotRing:
    def __init__(self, name, slots, slot_bytes):
        self.shm = shared_memory.SharedMemory(name, create=True, size=slots * slot_bytes)  # clean: closed and unlinked in close()
        self.slot_bytes = slot_bytes
        self._refs = [0] * slots
        self._seq = [0] * slots
        self._free = deque(range(slots))
        self._cv = threading.Condition()

    def raw(self, idx):
        return self.shm.buf[idx * self.slot_bytes:(idx + 1) * self.slot_bytes]

    def claim(self, timeout=0.0, refs=1):
        """An unpublished slot with so many references, or -1."""
        with self._cv:
            if not self._cv.wait_for(lambda: self._free, timeout):
                return -1
            idx = self._free.popleft()  # clean: the index goes to the caller
            self._refs[idx] = refs
            return idx

    def claim_pair(self):
        a = self.claim()  # clean: near miss, unref'd when there is no second one, else returned
        b = self.claim() if a >= 0 else -1  # clean: returned along with the first
        if b < 0:
            if a >= 0:
                self.unref(a)
            raise SegmentFull
        return a, b

    def unref(self, idx):
        with self._cv:
            self._refs[idx] -= 1
            if self._refs[idx] == 0:
                self._seq[idx] = 0
                self._free.append(idx)
                self._cv.notify()

    def pin(self, idx):
        """A View that must be unpinned, or None when the slot is not published any more."""
        with self._cv:
            if self._seq[idx] == 0:
                return None
            self._refs[idx] += 1
            return View(self, idx, self._seq[idx])

    def close(self):
        self.shm.close()
        self.shm.unlink()

    def seal(self, idx, seq):
        self._seq[idx] = seq


class Inbox:
    def __init__(self):
        self.items = deque()
        self.event = threading.Event()

    def put(self, idx):
        self.items.append(idx)
        self.event.set()


class Topic:
    """Broadcast: every subscriber owns one reference of each slot in its inbox."""

    def __init__(self, ring):
        self.ring = ring
        self.inboxes = {}
        self.seq = 0

    def subscribe(self, who):
        return self.inboxes.setdefault(who, Inbox())

    def unsubscribe(self, who):
        box = self.inboxes.pop(who)
        box.items.clear()

    def publish(self, payload, kind=0):
        if not self.inboxes:
            return False
        idx = self.ring.claim(0.1, len(self.inboxes))  # leak: unsubscribe() clears an inbox with its references still counted
        if idx < 0:
            return False
        self.seq += 1
        n = min(len(payload), self.ring.slot_bytes - HEADER.size)
        raw = self.ring.raw(idx)
        HEADER.pack_into(raw, 0, self.seq, n, kind, 0)
        raw[HEADER.size:HEADER.size + n] = payload[:n]
        self.ring.seal(idx, self.seq)
        for box in self.inboxes.values():
            box.put(idx)
        return True

    def publish_control(self, kind, flags, body=b""):
        idx = self.ring.claim(0.0, max(1, len(self.inboxes)))  # leak: a header that does not pack returns with the slot claimed
        if idx < 0:
            return False
        try:
            HEADER.pack_into(self.ring.raw(idx), 0, self.seq + 1, len(body), kind, flags)
        except struct.error:
            return False
        self.seq += 1
        self.ring.seal(idx, self.seq)
        for box in self.inboxes.values():
            box.put(idx)
        return True

    def consume(self, who, handle):
        box = self.inboxes[who]
        while box.items:
            idx = box.items.popleft()
            view = self.ring.pin(idx)  # clean: unpinned in finally, and the inbox reference is given up before
            self.ring.unref(idx)
            if view is None:
                continue
            try:
                handle(view.array())
            finally:
                view.unpin()


def follow(ring, indices):
    for idx in indices:
        view = ring.pin(idx)  # leak: the unpin after the yield is not reached when find_return() breaks out
        if view is None:
            continue
        yield view.seq, view.array()
        view.unpin()


def find_return(ring, indices, threshold):
    best = None
    for seq, arr in follow(ring, indices):
        score = float(arr[-4:].view(np.float32)[0])
        if score >= threshold:
            best = seq, score
            break
    return best


class ReplayCache:
    def __init__(self, ring, capacity):
        self.ring, self.capacity = ring, capacity
        self.by_actor, self.marks = {}, []

    def note(self, actor, idx):
        view = self.ring.pin(idx)  # leak: an actor's second trajectory overwrites its pinned view
        if view is None:
            return
        self.by_actor[actor] = view
        if len(self.by_actor) > self.capacity:
            self.by_actor.pop(next(iter(self.by_actor))).unpin()

    def bookmark(self, idx):
        view = self.ring.pin(idx)  # clean: near miss, held in marks until close() or trim()
        if view is not None:
            self.marks.append(view)

    def trim(self, keep):
        gone, self.marks = self.marks[:-keep or None], self.marks[-keep:] if keep else []
        for view in gone:
            view.unpin()

    def close(self):
        for view in self.by_actor.values():
            view.unpin()
        self.trim(0)


def gather(ring, box, n, deadline):
    """n views, or None when they do not come in time."""
    views = []
    while len(views) < n:
        if not box.event.wait(max(0.0, deadline - time.monotonic())):
            return None
        box.event.clear()
        while box.items and len(views) < n:
            idx = box.items.popleft()
            view = ring.pin(idx)  # leak: the return at the deadline forgets the views that were gathered
            ring.unref(idx)
            if view is not None:
                views.append(view)
    return views


def learner_batch(ring, box, n):
    views = gather(ring, box, n, time.monotonic() + 2.0)  # clean: near miss, None holds nothing and the stack closes the others
    if views is None:
        return None
    with contextlib.ExitStack() as stack:
        for view in views:
            stack.callback(view.unpin)
        return np.stack([v.array().copy() for v in views])


class Keepalive(np.ndarray): ...


def zero_copy(ring, idx):
    view = ring.pin(idx)  # clean: near miss, the finalizer of the array unpins it
    if view is None:
        raise Torn(idx)
    out = view.array().view(Keepalive)
    weakref.finalize(out, view.unpin)
    return out


def checksum(ring, idx):
    view = ring.pin(idx)  # clean: closing() unpins
    if view is None:
        return 0
    with contextlib.closing(view):
        return int(view.array().sum())


def ping_pong(ring, rounds):
    for _ in range(rounds):
        a, b = ring.claim_pair()  # clean: both are unref'd in each round
        ring.raw(a)[:8] = bytes(8)
        ring.raw(b)[:8] = bytes(ring.raw(a)[:8])
        ring.unref(a)
        ring.unref(b)
