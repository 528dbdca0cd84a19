"""Event and stream stocks for overlapped copies, and a timing helper."""
import threading
from collections import deque

import torch


class EventStock:
    def __init__(self):
        self._idle = deque()

    def lease(self):
        if self._idle:
            return self._idle.popleft()  # clean: handed to the caller
        return torch.cuda.Event(enable_timing=True)

    def return_(self, ev):
        self._idle.append(ev)


class StreamRing:
    """A fixed number of side streams guarded by a semaphore."""

    def __init__(self, n):
        self._streams = [torch.cuda.Stream() for _ in range(n)]
        self._sem = threading.BoundedSemaphore(n)
        self._lock = threading.Lock()

    def hire(self, timeout=None):
        if not self._sem.acquire(timeout=timeout):  # clean: near miss, the permit goes out with the stream and dismiss releases it
            return None
        with self._lock:
            return self._streams.pop()  # clean: handed to the caller

    def dismiss(self, stream):
        with self._lock:
            self._streams.append(stream)
        self._sem.release()

    def hire_matching(self, device):
        if not self._sem.acquire(blocking=False):  # leak: the permit is kept when no stream matches
            return None
        with self._lock:
            for i, s in enumerate(self._streams):
                if s.device == device:
                    return self._streams.pop(i)  # clean: handed to the caller
        return None


EVENTS = EventStock()


class Span:
    """Times a region; the two events return on exit."""

    def __init__(self, name, sink, enabled=True):
        self.name = name
        self.sink = sink
        self.enabled = enabled

    def __enter__(self):
        if self.enabled:
            self.start = EVENTS.lease()  # clean: near miss, guarded by the same unchanging flag as the exit
            self.stop = EVENTS.lease()  # clean: near miss, guarded by the same unchanging flag as the exit
            self.start.record()
        return self

    def __exit__(self, et, ev, tb):
        if not self.enabled:
            return False
        self.stop.record()
        self.stop.synchronize()
        if et is None:
            self.sink[self.name] = self.start.elapsed_time(self.stop)
        EVENTS.return_(self.start)
        EVENTS.return_(self.stop)
        return False


class QuickSpan:
    """Span that skips reporting of very short regions."""

    def __init__(self, name, sink, floor_ms=0.05):
        self.name = name
        self.sink = sink
        self.floor_ms = floor_ms

    def __enter__(self):
        self.start = EVENTS.lease()  # leak: __exit__ returns before the return_ calls for short regions
        self.stop = EVENTS.lease()  # leak: __exit__ returns before the return_ calls for short regions
        self.start.record()
        return self

    def __exit__(self, *exc):
        self.stop.record()
        self.stop.synchronize()
        ms = self.start.elapsed_time(self.stop)
        if ms < self.floor_ms:
            return False
        self.sink[self.name] = ms
        EVENTS.return_(self.start)
        EVENTS.return_(self.stop)
        return False


class CopyEngine:
    def __init__(self, ring):
        self.ring = ring
        self.inflight = []

    def upload(self, host, device):
        stream = self.ring.hire()  # clean: dismissed after the copy is recorded
        done = EVENTS.lease()  # clean: near miss, parked in inflight and returned by reap or finish
        with torch.cuda.stream(stream):
            out = host.to(device, non_blocking=True)
            done.record()
        self.ring.dismiss(stream)
        self.inflight.append((done, host))
        return out

    def reap(self):
        rest = []
        for done, host in self.inflight:
            if done.query():
                EVENTS.return_(done)
            else:
                rest.append((done, host))
        self.inflight = rest

    def finish(self):
        for done, _ in self.inflight:
            done.synchronize()
            EVENTS.return_(done)
        self.inflight = []

    def probe_bandwidth(self, host, device):
        start = EVENTS.lease()  # clean: returned at the end
        stop = EVENTS.lease()  # leak: only the start event is returned
        start.record()
        host.to(device)
        stop.record()
        stop.synchronize()
        ms = start.elapsed_time(stop)
        EVENTS.return_(start)
        return host.nbytes / max(ms, 1e-6)

    def mirror(self, pairs):
        for src, dst in pairs:
            stream = self.ring.hire(timeout=0.1)  # leak: an equal shape is required and the continue does not dismiss
            if stream is None:
                continue
            if src.shape != dst.shape:
                continue
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
            stream.synchronize()
            self.ring.dismiss(stream)
