"""Shared-memory ring between data loader workers and the training process.

Slots of a fixed segment are claimed by producers, filled, sealed and handed to the
consumer, which frees them. Decoders use a per-process arena with marks.
"""
import ctypes
import logging
import multiprocessing as mp
import queue
import struct
import time
from multiprocessing import shared_memory

import numpy as np

_log = logging.getLogger(__name__)

_HEAD = struct.Struct("<QIHH")
FREE, CLAIMED, SEALED = 0, 1, 2


class RingClosed(Exception):
    pass


class CorruptSample(ValueError):
    pass


class ShmRing:
    def __init__(self, slots, slot_bytes, name=None):
        self.slots, self.slot_bytes = slots, slot_bytes
        self.owner = name is None
        if name is None:
            self.shm = shared_memory.SharedMemory(create=True, size=slots * slot_bytes)  # clean: kept in self.shm, closed and unlinked by close
        else:
            self.shm = shared_memory.SharedMemory(name=name)  # clean: kept in self.shm, closed by close
        self.state = mp.Array(ctypes.c_uint8, slots)
        self.sealed = mp.Queue()
        self.closing = mp.Event()

    def claim(self):
        """Index of a free slot or None."""
        with self.state.get_lock():
            for i in range(self.slots):
                if self.state[i] == FREE:
                    self.state[i] = CLAIMED
                    return i
        return None

    def claim_wait(self, timeout=5.0):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            i = self.claim()  # leak: a ring that is closing raises with the slot claimed
            if self.closing.is_set():
                raise RingClosed()
            if i is not None:
                return i
            time.sleep(0.001)
        return None

    def seal(self, i):
        with self.state.get_lock():
            self.state[i] = SEALED
        self.sealed.put(i)

    def free(self, i):
        with self.state.get_lock():
            self.state[i] = FREE

    def next_sealed(self, timeout):
        try:
            return self.sealed.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def view(self, i):
        return np.ndarray((self.slot_bytes,), np.uint8, self.shm.buf, i * self.slot_bytes)

    def close(self):
        self.closing.set()
        self.shm.close()
        if self.owner:
            self.shm.unlink()


class Arena:
    """Bump allocator with marks: `mark` opens a scope, `unwind` frees all above it."""

    def __init__(self, nbytes):
        self.mem = np.empty(nbytes, np.uint8)
        self.pos = 0
        self.marks = []

    def mark(self):
        self.marks.append(self.pos)
        return len(self.marks) - 1

    def push(self, n):
        if self.pos + n > self.mem.size:
            return None
        out = self.mem[self.pos:self.pos + n]
        self.pos += n
        return out

    def unwind(self, m):
        self.pos = self.marks[m]
        del self.marks[m:]


class Scope:
    def __init__(self, arena):
        self.arena = arena

    def __enter__(self):
        self.m = self.arena.mark()  # clean: __exit__ unwinds before it looks at the exception
        return self.arena

    def __exit__(self, et, ev, tb):
        self.arena.unwind(self.m)
        if et is CorruptSample:
            _log.warning("corrupt sample: %s", ev)
            return False
        return None


class Producer:
    def __init__(self, ring, arena, dataset):
        self.ring = ring
        self.arena = arena
        self.dataset = dataset

    def _decode(self, raw):
        """Pixels in arena memory; freed when the caller's mark is unwound."""
        if len(raw) < _HEAD.size:
            raise CorruptSample("header")
        _, n, h, w = _HEAD.unpack_from(raw)
        out = self.arena.push(n)  # clean: freed by the caller's unwind
        if out is None:
            return None
        body = np.frombuffer(raw, np.uint8, offset=_HEAD.size)
        out[:body.size] = body[:n]
        return out

    def produce(self, key):
        slot = self.ring.claim_wait()  # leak: returns with the slot claimed when the arena is full
        if slot is None:
            return False
        with Scope(self.arena):  # clean: the context manager unwinds
            px = self._decode(self.dataset[key])  # clean: unwound with the scope
            if px is None:
                return False
            self.ring.view(slot)[:px.size] = px
        self.ring.seal(slot)
        return True

    def produce_checked(self, key):
        m = self.arena.mark()  # clean: unwound in finally
        try:
            px = self._decode(self.dataset[key])  # clean: unwound in finally
            if px is None:
                return False
            slot = self.ring.claim_wait()  # clean: near miss, freed when the sample is too big for it, else sealed
            if slot is None:
                return False
            if px.size > self.ring.slot_bytes:
                self.ring.free(slot)
                return False
            self.ring.view(slot)[:px.size] = px
            self.ring.seal(slot)
            return True
        finally:
            self.arena.unwind(m)

    def stats(self, keys):
        total = 0.0
        m = self.arena.mark()  # leak: the mark is not unwound when the arena fills up
        for key in keys:
            px = self._decode(self.dataset[key])  # leak: stays in the arena with the abandoned mark
            if px is None:
                return None
            total += float(px.mean())
        self.arena.unwind(m)
        return total / max(1, len(keys))


class Consumer:
    def __init__(self, ring, keep=2):
        self.ring = ring
        self.keep = keep
        self.recent = []

    def batches(self, n, timeout=1.0):
        """Copies; slots are freed before the batch is yielded."""
        while not self.ring.closing.is_set():
            held = []
            while len(held) < n:
                slot = self.ring.next_sealed(timeout)  # leak: a partial batch is abandoned when the producers fall silent
                if slot is None:
                    return
                held.append(slot)
            batch = np.stack([self.ring.view(s) for s in held])
            for s in held:
                self.ring.free(s)
            yield batch

    def views(self, timeout=1.0):
        """Zero-copy; a view is valid until `keep` more have been yielded."""
        try:
            while True:
                slot = self.ring.next_sealed(timeout)  # clean: near miss, self.recent holds it, finally frees what is left
                if slot is None:
                    return
                self.recent.append(slot)
                if len(self.recent) > self.keep:
                    self.ring.free(self.recent.pop(0))
                yield self.ring.view(slot)
        finally:
            while self.recent:
                self.ring.free(self.recent.pop())

    def sample_header(self, timeout=1.0):
        slot = self.ring.next_sealed(timeout)  # leak: the header is unpacked from the view and the slot is never freed
        if slot is None:
            return None
        return _HEAD.unpack_from(self.ring.view(slot).tobytes())
