'''Shared-memory ring between data-loading workers and the trainer.'''
import itertools
import logging
import queue
import random
import struct

import numpy as np
import torch

_logger = logging.getLogger(__name__)
_HDR = struct.Struct("<II")


class RingFull(Exception):
    pass


class SlotRing:
    """`slots` equally large byte ranges of one array."""

    def __init__(self, slots=64, slot_bytes=1 << 20):
        self.mem = np.zeros((slots, slot_bytes), dtype=np.uint8)
        self.state = bytearray(slots)
        self.cursor = itertools.cycle(range(slots))
        self.slots = slots

    def lock_slot(self):
        for _ in range(self.slots):
            i = next(self.cursor)
            if not self.state[i]:
                self.state[i] = 1
                return i
        raise RingFull()

    def unlock_slot(self, i):
        self.state[i] = 0


class Producer:
    def __init__(self, dataset, ring, out):
        self.dataset = dataset
        self.ring = ring
        self.out = out
        self.dropped = 0

    def write(self, idx):
        sample = self.dataset[idx]
        slot = self.ring.lock_slot()  # clean: the number goes through the queue, Consumer unlocks
        data = sample.tobytes()
        self.ring.mem[slot, : len(data)] = np.frombuffer(data, np.uint8)
        self.out.put((slot, len(data)))

    def write_filtered(self, idx, keep):
        slot = self.ring.lock_slot()  # leak: samples that are filtered out keep their slot
        sample = self.dataset[idx]
        if not keep(sample):
            self.dropped += 1
            return
        data = sample.tobytes()
        self.ring.mem[slot, : len(data)] = np.frombuffer(data, np.uint8)
        self.out.put((slot, len(data)))

    def write_all(self, indices):
        for idx in indices:
            try:
                self.write(idx)
            except RingFull:
                _logger.debug("ring full at %d", idx)
                self.dropped += 1

    def write_capped(self, idx):
        slot = self.ring.lock_slot()  # clean: near miss, unlocked when the outbox refuses the slot
        data = self.dataset[idx].tobytes()
        self.ring.mem[slot, : len(data)] = np.frombuffer(data, np.uint8)
        try:
            self.out.put_nowait((slot, len(data)))
        except queue.Full:
            self.ring.unlock_slot(slot)
            self.dropped += 1

    def write_lossy(self, idx):
        slot = self.ring.lock_slot()  # leak: a full outbox is counted, the slot stays locked
        data = self.dataset[idx].tobytes()
        self.ring.mem[slot, : len(data)] = np.frombuffer(data, np.uint8)
        try:
            self.out.put_nowait((slot, len(data)))
        except queue.Full:
            self.dropped += 1


class Consumer:
    def __init__(self, ring, inbox):
        self.ring = ring
        self.inbox = inbox
        self.window = []

    def __iter__(self):
        while True:
            item = self.inbox.get()
            if item is None:
                return
            slot, n = item
            batch = torch.from_numpy(self.ring.mem[slot, :n].copy())
            self.ring.unlock_slot(slot)
            yield batch

    def zero_copy(self, n):
        for _ in range(n):
            slot, size = self.inbox.get()
            try:
                yield torch.from_numpy(self.ring.mem[slot, :size])
            finally:
                self.ring.unlock_slot(slot)


class Shuffler:
    """Holds slots of its own in which samples wait."""

    def __init__(self, ring, depth):
        self.ring = ring
        self.held = [ring.lock_slot() for _ in range(depth)]  # clean: close() unlocks every one
        self.extra = {}

    def exchange(self, data):
        j = random.randrange(len(self.held))
        fresh = self.ring.lock_slot()  # clean: near miss, put in place of the old one, which is unlocked
        self.ring.mem[fresh, : len(data)] = data
        old = self.held[j]
        self.held[j] = fresh
        out = self.ring.mem[old].copy()
        self.ring.unlock_slot(old)
        return out

    def replace(self, data):
        j = random.randrange(len(self.held))
        out = self.ring.mem[self.held[j]].copy()
        fresh = self.ring.lock_slot()  # leak: data too long leaves before `fresh` is stored
        if len(data) > self.ring.mem.shape[1]:
            return out
        self.ring.unlock_slot(self.held[j])
        self.held[j] = fresh
        self.ring.mem[fresh, : len(data)] = data
        return out

    def stash(self, key, data):
        self.extra[key] = self.ring.lock_slot()  # leak: the same key again overwrites a locked slot
        self.ring.mem[self.extra[key], : len(data)] = data

    def unstash(self, key):
        slot = self.extra.pop(key)
        data = self.ring.mem[slot].copy()
        self.ring.unlock_slot(slot)
        return data

    def close(self):
        for s in self.held:
            self.ring.unlock_slot(s)
        del self.held[:]
        for key in list(self.extra):
            self.unstash(key)


def header_roundtrip(ring, a, b):
    slot = ring.lock_slot()  # clean: single path
    _HDR.pack_into(ring.mem[slot], 0, a, b)
    res = _HDR.unpack_from(ring.mem[slot], 0)
    ring.unlock_slot(slot)
    return res


def fill_ratio(ring):
    taken = []
    try:
        while True:
            taken.append(ring.lock_slot())  # clean: near miss, the full ring ends the loop and all are unlocked
    except RingFull:
        pass
    free = len(taken)
    for s in taken:
        ring.unlock_slot(s)
    return 1 - free / ring.slots


def longest_run(ring):
    best = run = 0
    last = -2
    try:
        while True:
            s = ring.lock_slot()  # leak: all slots of the ring end up locked
            run = run + 1 if s == last + 1 else 1
            best, last = max(best, run), s
    except RingFull:
        return best
