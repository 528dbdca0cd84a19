"""Staging buffers between host batches and the device: claim/recycle with events."""
from __future__ import annotations

import threading
import weakref
from functools import wraps


class StagingBuffer:
    def __init__(self, idx, nbytes):
        self.idx = idx
        self.nbytes = nbytes
        self.event = threading.Event()

    def stage(self, payload):
        return len(payload) <= self.nbytes


class StagingRing:
    def __init__(self, n, nbytes):
        self._slots = [StagingBuffer(i, nbytes) for i in range(n)]
        self._mask = [True] * n

    def claim(self):
        for i, idle in enumerate(self._mask):
            if idle:
                self._mask[i] = False  # clean: the caller holds buffer i
                return self._slots[i]
        return None

    def recycle(self, buf):
        buf.event.clear()
        self._mask[buf.idx] = True


class Uploader:
    """Owns a buffer after send_owned(); otherwise the caller keeps it."""

    def __init__(self, ring):
        self.ring = ring
        self.queue = []

    def send_owned(self, buf, payload):
        buf.stage(payload)
        self.queue.append(buf)

    def send_maybe(self, buf, payload):
        if not buf.stage(payload):
            return False
        self.queue.append(buf)
        return True

    def send_sync(self, buf, payload):
        """Stages, waits, and leaves the buffer with the caller."""
        buf.stage(payload)
        buf.event.set()

    def poll(self):
        still = []
        for buf in self.queue:
            if buf.event.is_set():
                self.ring.recycle(buf)
            else:
                still.append(buf)
        self.queue = still

    def finish(self):
        for buf in self.queue:
            buf.event.set()
        self.poll()


class BatchFeeder:
    def __init__(self, ring, uploader):
        self.ring = ring
        self.uploader = uploader
        self.labels = None
        self.ahead = []

    def feed(self, payload):
        buf = self.ring.claim()  # leak: send_maybe refuses big payloads and the answer is only returned
        if buf is None:
            return False
        return self.uploader.send_maybe(buf, payload)

    def feed_checked(self, payload):
        buf = self.ring.claim()  # clean: near miss, recycled here exactly where send_maybe did not take it
        if buf is None:
            return False
        taken = self.uploader.send_maybe(buf, payload)
        if not taken:
            self.ring.recycle(buf)
        return taken

    def feed_owned(self, payload):
        buf = self.ring.claim()  # clean: near miss, send_owned takes it whatever the payload
        if buf is None:
            return False
        self.uploader.send_owned(buf, payload)
        return True

    def feed_sync(self, payload):
        buf = self.ring.claim()  # leak: send_sync leaves the buffer with this function, which drops it
        if buf is None:
            return False
        self.uploader.send_sync(buf, payload)
        return True

    def set_labels(self, payload):
        self.labels = self.ring.claim()  # leak: called for each batch, the labels buffer before it is overwritten
        if self.labels is not None:
            self.labels.stage(payload)

    def lookahead(self, payloads):
        for payload in payloads:
            buf = self.ring.claim()  # clean: near miss, the overfull payload goes back, others wait in self.ahead
            if buf is None:
                break
            if not buf.stage(payload):
                self.ring.recycle(buf)
                continue
            self.ahead.append(buf)
        return len(self.ahead)

    def pop_ahead(self):
        if not self.ahead:
            return 0
        buf = self.ahead.pop(0)
        self.ring.recycle(buf)
        return buf.nbytes

    def close(self):
        while self.ahead:
            self.pop_ahead()
        if self.labels is not None:
            self.ring.recycle(self.labels)
            self.labels = None


class Tensor:
    """A device tensor whose staging buffer lives as long as it does."""

    def __init__(self, ring, payload):
        self.size = len(payload)
        buf = ring.claim()  # clean: near miss, the finalizer recycles it with the tensor
        if buf is not None:
            weakref.finalize(self, ring.recycle, buf)


def with_staging(ring):
    def deco(fn):
        @wraps(fn)
        def inner(payload):
            buf = ring.claim()  # clean: recycled in the finally round the wrapped call
            if buf is None:
                return None
            try:
                return fn(buf, payload)
            finally:
                ring.recycle(buf)
        return inner
    return deco


def pack_all(ring, payloads):
    total = 0
    buf = ring.claim()  # leak: when a payload does not fit, buf is rebound to a fresh buffer
    for payload in payloads:
        if buf is None:
            return total
        if not buf.stage(payload):
            buf = ring.claim()  # leak: a second refusal rebinds it again before anything was recycled
            continue
        total += len(payload)
    if buf is not None:
        ring.recycle(buf)
    return total


def measure(ring, payload):
    a = ring.claim()  # leak: recycled only where b was there too
    b = ring.claim() if a is not None else None  # clean: near miss, only claimed after a, so both are there or it is None
    n = 0
    if a is not None and b is not None:
        n = a.nbytes + b.nbytes - len(payload)
        ring.recycle(a)
        ring.recycle(b)
    return n
