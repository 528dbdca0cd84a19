"""Pinned host staging buffers for asynchronous host<->device copies."""
import collections
import logging
import threading
import time

import torch

log = logging.getLogger(__name__)


class Staging:
    __slots__ = ("host", "cap", "event")

    def __init__(self, cap, pin):
        self.host = torch.empty(cap, dtype=torch.uint8, pin_memory=pin)
        self.cap = cap
        self.event = None

    def view(self, n, dtype):
        size = torch.empty((), dtype=dtype).element_size()
        return self.host[: n * size].view(dtype)


class StagingRing:
    """A fixed number of pinned buffers; buffers in flight wait for their event."""

    def __init__(self, count, cap, pin=False):
        self._ready = collections.deque(Staging(cap, pin) for _ in range(count))
        self._flying = collections.deque()
        self._cv = threading.Condition()

    def _reap(self):
        while self._flying and self._flying[0].event.query():
            buf = self._flying.popleft()
            buf.event = None
            self._ready.append(buf)

    def rent(self, timeout=1.0):
        """A buffer, or None when none came free in time."""
        deadline = time.monotonic() + timeout
        with self._cv:
            while True:
                self._reap()
                if self._ready:
                    return self._ready.popleft()
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._cv.wait(min(left, 0.01))

    def give(self, buf):
        with self._cv:
            self._ready.append(buf)
            self._cv.notify()

    def fly(self, buf, stream):
        """Hand a buffer back once what is queued on stream has run."""
        ev = torch.cuda.Event()
        ev.record(stream)
        buf.event = ev
        with self._cv:
            self._flying.append(buf)


class Uploader:
    def __init__(self, ring, device):
        self.ring = ring
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.stats = collections.Counter()

    def upload(self, src):
        buf = self.ring.rent()  # clean: flies back with the stream, given back when too small
        if buf is None:
            return src.to(self.device)
        if src.numel() * src.element_size() > buf.cap:
            self.ring.give(buf)
            return src.to(self.device)
        stage = buf.view(src.numel(), src.dtype)
        stage.copy_(src.flatten())
        with torch.cuda.stream(self.stream):
            dst = stage.to(self.device, non_blocking=True)
        self.ring.fly(buf, self.stream)
        return dst.view(src.shape)

    def upload_ids(self, ids):
        buf = self.ring.rent()  # leak: not given back when ids is empty
        if buf is None:
            raise TimeoutError("staging ring is busy")
        n = len(ids)
        if n == 0:
            return torch.empty(0, dtype=torch.long, device=self.device)
        stage = buf.view(n, torch.long)
        stage.copy_(torch.as_tensor(ids))
        with torch.cuda.stream(self.stream):
            dst = stage.to(self.device, non_blocking=True)
        self.ring.fly(buf, self.stream)
        return dst

    def upload_many(self, tensors):
        out = []
        for t in tensors:
            buf = self.ring.rent(timeout=5.0)  # clean: near miss, both branches end in give or fly
            if buf is None:
                out.append(t.to(self.device))
                continue
            nbytes = t.numel() * t.element_size()
            if nbytes > buf.cap:
                self.stats["oversize"] += 1
                self.ring.give(buf)
                out.append(t.to(self.device))
            else:
                stage = buf.view(t.numel(), t.dtype)
                stage.copy_(t.flatten())
                out.append(stage.to(self.device, non_blocking=True).view(t.shape))
                self.ring.fly(buf, torch.cuda.current_stream())
        return out

    def upload_with_retry(self, src, attempts=3):
        for attempt in range(attempts):
            buf = self.ring.rent(timeout=0.1 * (attempt + 1))  # leak: each failed copy retries with a new buffer
            if buf is None:
                continue
            try:
                stage = buf.view(src.numel(), src.dtype)
                stage.copy_(src.flatten())
                dst = stage.to(self.device, non_blocking=True)
            except RuntimeError as exc:
                log.warning("upload attempt %d failed: %s", attempt, exc)
                continue
            self.ring.fly(buf, torch.cuda.current_stream())
            return dst
        return src.to(self.device)

    def upload_blocking(self, src, attempts=3):
        buf = None
        for _ in range(attempts):
            buf = self.ring.rent(timeout=0.2)  # clean: near miss, only a None is ever rebound
            if buf is not None:
                break
        if buf is None:
            return src.to(self.device)
        try:
            stage = buf.view(src.numel(), src.dtype)
            stage.copy_(src.flatten())
            return stage.to(self.device)
        finally:
            self.ring.give(buf)


class Downloader:
    """Copies device results to host and calls back when the bytes have landed."""

    def __init__(self, ring):
        self.ring = ring
        self._waiting = {}
        self._lock = threading.Lock()

    def start(self, key, dev):
        if key in self._waiting:
            raise KeyError(key)
        buf = self.ring.rent()  # clean: kept in _waiting, which finish() and abort() empty
        if buf is None:
            return False
        buf.view(dev.numel(), dev.dtype).copy_(dev.flatten(), non_blocking=True)
        ev = torch.cuda.Event()
        ev.record()
        with self._lock:
            self._waiting[key] = (buf, ev, dev.numel(), dev.dtype)
        return True

    def start_unique(self, key, dev):
        buf = self.ring.rent()  # leak: a key that is waiting already returns without giving it back
        if buf is None:
            return False
        with self._lock:
            if key in self._waiting:
                return False
            ev = torch.cuda.Event()
            self._waiting[key] = (buf, ev, dev.numel(), dev.dtype)
        buf.view(dev.numel(), dev.dtype).copy_(dev.flatten(), non_blocking=True)
        ev.record()
        return True

    def finish(self, key):
        with self._lock:
            buf, ev, n, dtype = self._waiting.pop(key)
        ev.synchronize()
        host = buf.view(n, dtype).clone()
        self.ring.give(buf)
        return host

    def abort(self):
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for buf, ev, _, _ in waiting.values():
            ev.synchronize()
            self.ring.give(buf)

    def fetch(self, dev, on_done=None):
        buf = self.ring.rent(timeout=10.0)  # leak: not given back when there is no callback
        if buf is None:
            raise TimeoutError("no staging buffer")
        stage = buf.view(dev.numel(), dev.dtype)
        stage.copy_(dev.flatten())
        if on_done is None:
            return stage.clone()
        try:
            on_done(stage)
        finally:
            self.ring.give(buf)
        return None

    def fetch_pair(self, a, b):
        first = self.ring.rent()  # clean: given back when second is None and at the end
        if first is None:
            return None
        second = self.ring.rent()  # clean: given back at the end
        if second is None:
            self.ring.give(first)
            return None
        ha = first.view(a.numel(), a.dtype).copy_(a.flatten()).clone()
        hb = second.view(b.numel(), b.dtype).copy_(b.flatten()).clone()
        for buf in (first, second):
            self.ring.give(buf)
        return ha, hb


class RentedStage:
    """with RentedStage(ring) as buf: ..."""

    def __init__(self, ring, keep_on_error=False):
        self.ring = ring
        self.keep_on_error = keep_on_error
        self.buf = None

    def __enter__(self):
        self.buf = self.ring.rent(timeout=30.0)  # leak: __exit__ returns early for RuntimeError and keeps it
        if self.buf is None:
            raise TimeoutError("no staging buffer")
        return self.buf

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None and issubclass(exc_type, RuntimeError):
            log.error("copy failed: %s", exc)
            return True
        self.ring.give(self.buf)
        self.buf = None
        return False


def checksum(ring, dev):
    buf = ring.rent()  # clean: given back in finally
    if buf is None:
        return None
    try:
        stage = buf.view(dev.numel(), dev.dtype)
        stage.copy_(dev.flatten())
        return int(stage.to(torch.int64).sum())
    finally:
        ring.give(buf)


def drain(ring, count):
    """Take all the buffers once so that none is in flight, then hand them back."""
    held = []
    while len(held) < count:
        buf = ring.rent(timeout=60.0)  # clean: near miss, held is handed back after the loop on every way out
        if buf is None:
            break
        held.append(buf)
    complete = len(held) == count
    for buf in held:
        ring.give(buf)
    return complete
