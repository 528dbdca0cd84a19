"""Side streams and events for overlapping copies with compute.

Creating them is not free, and a process that creates them per request ends up with thousands.
"""
import functools
import threading
import weakref
from collections import deque
from contextlib import contextmanager

import torch

_tls = threading.local()


class Lent(Exception):
    """Raised for a second borrow by the same owner."""


class Busy(Exception):
    pass


class Handle:
    __slots__ = ("obj", "kind", "owner", "serial", "__weakref__")

    def __init__(self, obj, kind, serial):
        self.obj, self.kind, self.owner, self.serial = obj, kind, None, serial


class Pool:
    def __init__(self, kind, make, cap):
        self.kind, self.make, self.cap = kind, make, cap
        self.idle = deque()
        self.n = 0
        self.lock = threading.Lock()
        self.live = weakref.WeakSet()

    def get(self, owner=None):
        with self.lock:
            if owner is not None and any(h.owner is owner for h in self.live):
                raise Lent(f"{owner!r} has a {self.kind}")
            if self.idle:
                h = self.idle.popleft()  # clean: returned
            elif self.n < self.cap:
                self.n += 1
                h = Handle(self.make(), self.kind, self.n)  # clean: returned
                self.live.add(h)
            else:
                raise Busy(f"{self.n} {self.kind}s out")
            h.owner = owner
            return h

    def get_ready(self):
        """An idle event whose work is done, or None."""
        with self.lock:
            for _ in range(len(self.idle)):
                h = self.idle.popleft()  # clean: near miss, rotated to the back unless it is returned
                if h.obj.query():
                    return h
                self.idle.append(h)
        return None

    def put(self, h):
        h.owner = None
        with self.lock:
            self.idle.append(h)

    def swap(self, h):
        """Exchange a handle that may be poisoned for a good one."""
        with self.lock:
            while self.idle:
                g = self.idle.pop()  # leak: handles that fail the probe are popped one after another and not put anywhere
                if g.obj.query():
                    self.idle.append(h)
                    return g
        return h


streams = Pool("stream", torch.cuda.Stream, 16)
events = Pool("event", functools.partial(torch.cuda.Event, enable_timing=True), 256)


@contextmanager
def side(owner=None):
    h = streams.get(owner)  # clean: finally
    try:
        h.obj.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(h.obj):
            yield h.obj
        torch.cuda.current_stream().wait_stream(h.obj)
    finally:
        streams.put(h)


def on_side(fn):
    @functools.wraps(fn)
    def inner(*a, **k):
        try:
            h = streams.get()  # clean: Busy falls back before anything is held and the else has a finally
        except Busy:
            return fn(*a, **k)
        else:
            try:
                with torch.cuda.stream(h.obj):
                    return fn(*a, **k)
            finally:
                streams.put(h)
    return inner


def timed(sink):
    """Decorator: sink gets the milliseconds of each call, later."""
    def deco(fn):
        waiting = deque()

        def drain(block):
            while waiting:
                t0, t1, name = waiting[0]
                if not block and not t1.obj.query():
                    return
                waiting.popleft()
                t1.obj.synchronize()
                sink(name, t0.obj.elapsed_time(t1.obj))
                events.put(t0)
                events.put(t1)

        @functools.wraps(fn)
        def inner(*a, **k):
            drain(False)
            t0 = events.get()  # leak: the second get may raise Busy, which collect() catches, with the first in no list
            t0.obj.record()
            out = fn(*a, **k)
            t1 = events.get()  # clean: waits in the deque for drain()
            t1.obj.record()
            waiting.append((t0, t1, fn.__name__))
            return out

        inner.flush = functools.partial(drain, True)
        return inner
    return deco


class Copier:
    def __init__(self, dev):
        self.dev = dev
        self.jobs = {}
        self.done = {}

    def start(self, key, host):
        if key in self.jobs:
            return self
        s = streams.get()  # clean: near miss, the except puts it back when there is no event, ready() otherwise
        try:
            e = events.get()  # leak: ready() puts the stream back and keeps the event
        except Busy:
            streams.put(s)
            raise
        with torch.cuda.stream(s.obj):
            t = host.to(self.dev, non_blocking=True)
            e.obj.record(s.obj)
        self.jobs[key] = (t, s, e)
        return self

    def ready(self, key):
        if key in self.done:
            return self.done.pop(key)
        t, s, e = self.jobs.pop(key)
        torch.cuda.current_stream().wait_event(e.obj)
        t.record_stream(torch.cuda.current_stream())
        streams.put(s)
        return t

    def poll(self):
        for key in [k for k, (_, _, e) in self.jobs.items() if e.obj.query()]:
            self.done[key] = self.ready(key)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for key in list(self.jobs):
            self.ready(key)


class Fence:
    """Counts down consumers; the last one puts the event back."""

    def __init__(self, consumers):
        self.ev = events.get()  # clean: near miss, the consumer that brings left to zero puts it back
        self.left = consumers
        self.lock = threading.Lock()

    def signal(self):
        self.ev.obj.record()

    def wait(self):
        torch.cuda.current_stream().wait_event(self.ev.obj)
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last:
            events.put(self.ev)


def thread_stream():
    """One stream for each thread, put back by thread_end()."""
    h = getattr(_tls, "h", None)
    if h is None:
        h = _tls.h = streams.get(threading.current_thread())  # clean: near miss, kept in thread-local storage for thread_end()
    return h.obj


def thread_end():
    h = _tls.__dict__.pop("h", None)
    if h is not None:
        streams.put(h)


def upto(n):
    hs = []
    while len(hs) < n:
        try:
            hs.append(streams.get())  # clean: near miss, Busy ends the loop and the list is returned as it is
        except Busy:
            break
    return hs


def split_copy(src, dst, parts):
    hs = upto(parts)  # leak: a single stream is no gain, so a list of one returns early without the put
    if len(hs) < 2:
        dst.copy_(src)
        return 0
    for i, (a, b) in enumerate(zip(src.chunk(parts), dst.chunk(parts))):
        with torch.cuda.stream(hs[i % len(hs)].obj):
            b.copy_(a, non_blocking=True)
    for h in hs:
        torch.cuda.current_stream().wait_stream(h.obj)
        streams.put(h)
    return len(hs)


def collect(loader, step, dev):
    """Steps over a loader, copies one batch ahead; a step without resources is counted and skipped."""
    skipped, n = 0, 0
    with Copier(dev) as cp:  # clean: with
        for n, host in enumerate(loader):
            try:
                cp.start(n, host)
                step(cp.ready(n))
            except Busy:
                skipped += 1
    mark = events.get_ready()  # leak: the early return for no skipped step leaves with the event
    if mark is None or skipped == 0:
        return n + 1, 0
    mark.obj.synchronize()
    events.put(mark)
    return n + 1, skipped
