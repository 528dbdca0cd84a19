"""Moving weights and activations between host and device."""
from __future__ import annotations

import bisect
import itertools
import threading
from collections import defaultdict, deque
from contextlib import contextmanager

try:
    import torch
except ImportError:
    torch = None


class HostTensor:
    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.raw = bytearray(nbytes)

    def copy_(self, other):
        self.raw[: len(other)] = other
        return self


def empty_pinned(nbytes):
    if torch is not None and torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return HostTensor(nbytes)


class StagingExhausted(Exception):
    pass


class PinnedStaging:
    """Power-of-two size classes; a buffer is known again by its identity."""

    def __init__(self, limit=1 << 28):
        self._classes = defaultdict(list)
        self._leased = {}
        self._limit = limit
        self._bytes = 0

    @staticmethod
    def _size_class(nbytes):
        return max(12, (nbytes - 1).bit_length())

    def lease(self, nbytes):
        k = self._size_class(nbytes)
        if self._classes[k]:
            buf = self._classes[k].pop()
        else:
            if self._bytes + (1 << k) > self._limit:
                raise StagingExhausted(nbytes)
            buf = empty_pinned(1 << k)
            self._bytes += 1 << k
        self._leased[id(buf)] = (k, buf)
        return buf

    def unlease(self, buf):
        k, _ = self._leased.pop(id(buf))
        self._classes[k].append(buf)


def fetch_layer(staging, disk, layer):
    buf = staging.lease(layer.nbytes)  # leak: a short read returns before unlease
    n = disk.readinto(layer.path, buf)
    if n < layer.nbytes:
        return False
    layer.load(buf)
    staging.unlease(buf)
    return True


def spill(staging, disk, tensors):
    for t in tensors:
        buf = staging.lease(t.nbytes)  # clean: unleased in finally, also on continue
        try:
            if t.is_meta:
                continue
            disk.write(t.name, buf.copy_(t.data))
        finally:
            staging.unlease(buf)


class DoubleBuffer:
    def __init__(self, staging, nbytes):
        self.staging = staging
        self.front = staging.lease(nbytes)  # clean: close unleases both halves
        self.back = staging.lease(nbytes)  # clean: close unleases both halves

    def flip(self):
        self.front, self.back = self.back, self.front

    def close(self):
        for buf in (self.front, self.back):
            self.staging.unlease(buf)


class FakeStream:
    ids = itertools.count()

    def __init__(self):
        self.id = next(self.ids)

    def synchronize(self):
        pass

    def query(self):
        return True


class StreamRoster:
    """At most n side streams; those on duty are in a set."""

    def __init__(self, n=4, make=FakeStream):
        self._off_duty = [make() for _ in range(n)]
        self._on_duty = set()
        self._lock = threading.Lock()

    def enlist(self):
        with self._lock:
            if not self._off_duty:
                return None
            s = self._off_duty.pop()
            self._on_duty.add(s)
            return s

    def dismiss(self, stream):
        with self._lock:
            if stream not in self._on_duty:
                raise ValueError("stream is not on duty")
            self._on_duty.remove(stream)
            self._off_duty.append(stream)

    @contextmanager
    def duty(self):
        s = self.enlist()
        try:
            yield s
        finally:
            if s is not None:
                self.dismiss(s)


def copy_async(roster, copier, src, dst):
    stream = roster.enlist()  # leak: dismissed only if the copy is already done
    if stream is None:
        copier.blocking(src, dst)
        return
    copier.enqueue(stream, src, dst)
    if stream.query():
        roster.dismiss(stream)


def prefetch(roster, copier, layers):
    with roster.duty() as stream:  # clean: the context manager dismisses it
        for layer in layers:
            copier.enqueue(stream, layer.host, layer.device)


class CopyQueue:
    def __init__(self, roster, copier):
        self.roster = roster
        self.copier = copier
        self.flying = deque()

    def push(self, src, dst):
        stream = self.roster.enlist()  # clean: near miss, queued in flying which drain dismisses
        if stream is None:
            self.drain()
            return self.push(src, dst)
        self.copier.enqueue(stream, src, dst)
        self.flying.append((stream, dst))

    def drain(self):
        while self.flying:
            stream, dst = self.flying.popleft()
            stream.synchronize()
            dst.ready = True
            self.roster.dismiss(stream)


class Marker:
    def __init__(self):
        self.recorded = None

    def record(self, stream):
        self.recorded = stream

    def done(self):
        return self.recorded is None or self.recorded.query()


class MarkerBin:
    """Device events kept for use again; grows by eight."""

    def __init__(self):
        self._bin = deque()
        self.made = 0

    def draw(self):
        if not self._bin:
            self._bin.extend(Marker() for _ in range(8))
            self.made += 8
        return self._bin.popleft()

    def toss_back(self, *markers):
        for m in markers:
            m.recorded = None
            self._bin.append(m)


def time_step(bin_, stream, fn, clock):
    start = bin_.draw()  # clean: both tossed back together
    stop = bin_.draw()  # clean: both tossed back together
    start.record(stream)
    fn()
    stop.record(stream)
    ms = clock(start, stop)
    bin_.toss_back(start, stop)
    return ms


def fence_all(bin_, streams, consumer):
    last = None
    for s in streams:
        last = bin_.draw()  # leak: each turn rebinds it, only the last is tossed back
        last.record(s)
        consumer.wait(last)
    if last is not None:
        bin_.toss_back(last)


class HostArena:
    """First fit over a sorted list of holes; lends offsets."""

    def __init__(self, size):
        self._holes = [(0, size)]
        self._sizes = {}

    def settle(self, n):
        for k, (off, length) in enumerate(self._holes):
            if length >= n:
                if length == n:
                    del self._holes[k]
                else:
                    self._holes[k] = (off + n, length - n)
                self._sizes[off] = n
                return off
        return None

    def vacate(self, off):
        n = self._sizes.pop(off)
        k = bisect.bisect(self._holes, (off, 0))
        self._holes.insert(k, (off, n))
        if k + 1 < len(self._holes) and off + n == self._holes[k + 1][0]:
            self._holes[k] = (off, n + self._holes.pop(k + 1)[1])
        if k and self._holes[k - 1][0] + self._holes[k - 1][1] == off:
            prev, length = self._holes[k - 1]
            self._holes[k - 1] = (prev, length + self._holes.pop(k)[1])


class OptimizerPages:
    def __init__(self, arena):
        self.arena = arena
        self.at = {}

    def page_out(self, name, state):
        off = self.arena.settle(len(state))  # leak: paging the same name out again overwrites the offset
        if off is None:
            return False
        self.at[name] = off
        return True

    def page_in(self, name):
        self.arena.vacate(self.at.pop(name))


class ActivationPages:
    def __init__(self, arena):
        self.arena = arena
        self.at = {}

    def page_out(self, name, state):
        if name in self.at:
            self.arena.vacate(self.at.pop(name))
        off = self.arena.settle(len(state))  # clean: near miss, an older offset of the name is vacated first
        if off is not None:
            self.at[name] = off
        return off is not None

    def page_in(self, name):
        self.arena.vacate(self.at.pop(name))


class CopyDesk:
    """Asynchronous copies by ticket. A ticket lives until it is collected."""

    def __init__(self, worker, max_open=64):
        self._worker = worker
        self._open = {}
        self._numbers = itertools.count(100)
        self._max = max_open

    def hand_in(self, src, dst):
        if len(self._open) >= self._max:
            raise RuntimeError("too many open tickets")
        ticket = next(self._numbers)
        self._open[ticket] = self._worker.submit(src, dst)
        return ticket

    def collect(self, ticket):
        return self._open.pop(ticket).result()

    def is_done(self, ticket):
        return self._open[ticket].done()


def gather_shards(desk, shards, out):
    tickets = [desk.hand_in(s, out) for s in shards]  # clean: every ticket is collected
    return [desk.collect(t) for t in tickets]


def poll_copy(desk, src, dst, spins):
    ticket = desk.hand_in(src, dst)  # leak: after the spins it gives up without collect
    for _ in range(spins):
        if desk.is_done(ticket):
            return desk.collect(ticket)
    return None


def first_of(desk, src, dst, limit):
    pending = deque()
    for s in src:
        pending.append(desk.hand_in(s, dst))  # leak: the tickets still pending at the return are dropped
        if len(pending) < limit:
            continue
        result = desk.collect(pending.popleft())
        if result.ok:
            return result
    return None
