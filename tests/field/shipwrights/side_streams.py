"""Side streams and events for overlapping copies with compute."""
import functools
import threading
from collections import defaultdict, deque
from contextlib import contextmanager

import torch
import torch.nn as nn


class EventPool:
    def __init__(self):
        self._idle = deque()
        self.made = 0

    def draw(self):
        if self._idle:
            return self._idle.popleft()  # clean: returned to the caller
        self.made += 1
        return torch.cuda.Event(enable_timing=True)

    def toss(self, ev):
        self._idle.append(ev)

    def draw_done(self):
        """An event that the device has passed already."""
        for _ in range(len(self._idle)):
            ev = self._idle.popleft()  # clean: near miss, an event that is not over goes to the end of the queue
            if ev.query():
                return ev
            self._idle.append(ev)
        return None


class StreamPool:
    def __init__(self, sizes):
        self._lock = threading.Lock()
        self._by_priority = {p: [torch.cuda.Stream(priority=p) for _ in range(n)] for p, n in sizes.items()}
        self.events = EventPool()

    def hire(self, priority=0):
        with self._lock:
            if not self._by_priority[priority]:
                raise RuntimeError(f"no stream of priority {priority}")
            return self._by_priority[priority].pop()  # clean: returned to the caller

    def hire_quiet(self):
        """A stream without queued work."""
        with self._lock:
            for p, streams in self._by_priority.items():
                while streams:
                    s = streams.pop()  # leak: a busy stream is popped and not put back
                    if s.query():
                        return s
        return None

    def fire(self, stream):
        with self._lock:
            self._by_priority[stream.priority].append(stream)

    @contextmanager
    def side(self, priority=0):
        stream = self.hire(priority)  # clean: fired in the finally
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            self.fire(stream)


def maybe_on_side(pool, skip):
    """Like on_side_stream, but with a predicate."""

    def deco(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kw):
            stream = pool.hire()  # leak: a skipped call returns without fire
            if skip(*args):
                return None
            try:
                with torch.cuda.stream(stream):
                    return fn(*args, **kw)
            finally:
                pool.fire(stream)

        return wrapper

    return deco


class Prefetcher:
    """Copies the weights of the next layers on a side stream."""

    def __init__(self, pool, layers, ahead=2):
        self.pool = pool
        self.layers = layers
        self.ahead = ahead
        self.stream = None
        self.ready = {}
        self.marks = defaultdict(list)

    def start(self):
        if self.stream is None:
            self.stream = self.pool.hire(-1)  # clean: near miss, start() is idempotent and stop() fires it
        return self

    def stop(self):
        if self.stream is None:
            return
        for ev in self.ready.values():
            self.pool.events.toss(ev)
        self.ready.clear()
        self.pool.fire(self.stream)
        self.stream = None

    def request(self, i):
        for j in range(i, min(i + self.ahead, len(self.layers))):
            if j in self.ready:
                continue
            ev = self.pool.events.draw()  # clean: in ready until await_layer() or stop()
            with torch.cuda.stream(self.stream):
                for p in self.layers[j].parameters():
                    p.data = p.data.to("cuda", non_blocking=True)
            ev.record(self.stream)
            self.ready[j] = ev

    def await_layer(self, i):
        ev = self.ready.pop(i)
        torch.cuda.current_stream().wait_event(ev)
        self.pool.events.toss(ev)

    def mark(self, tag):
        ev = self.pool.events.draw()  # leak: report() tosses the first and last event only and clears the list
        ev.record(self.stream)
        self.marks[tag].append(ev)

    def report(self, tag):
        evs = self.marks.pop(tag, [])
        if len(evs) < 2:
            for ev in evs:
                self.pool.events.toss(ev)
            return 0.0
        evs[-1].synchronize()
        ms = evs[0].elapsed_time(evs[-1])
        self.pool.events.toss(evs[0])
        self.pool.events.toss(evs[-1])
        return ms


class OverlappedBlock(nn.Module):
    """Two branches on two streams."""

    def __init__(self, left, right, pool):
        super().__init__()
        self.left, self.right = left, right
        self.pool = pool

    def forward(self, x):
        with self.pool.side() as side:  # clean: fired on leaving
            fork = self.pool.events.draw()  # clean: tossed after the join
            join = self.pool.events.draw()  # leak: only fork is tossed
            fork.record()
            side.wait_event(fork)
            r = self.right(x)
            join.record(side)
        l = self.left(x)
        torch.cuda.current_stream().wait_event(join)
        self.pool.events.toss(fork)
        return l + r


class CopyEngine:
    def __init__(self, pool):
        self.pool = pool
        self.h2d = pool.hire()  # clean: close() fires both, and the handler fires it when there is no second
        try:
            self.d2h = pool.hire(-1)  # clean: close() fires both
        except RuntimeError:
            pool.fire(self.h2d)
            raise

    def close(self):
        self.pool.fire(self.h2d)
        self.pool.fire(self.d2h)

    def fetch(self, host, out=None):
        ev = self.pool.events.draw()  # clean: handed to the caller with the copy
        with torch.cuda.stream(self.h2d):
            dev = host.to("cuda", non_blocking=True) if out is None else out.copy_(host, non_blocking=True)
        ev.record(self.h2d)
        return dev, ev

    def fetch_all(self, hosts):
        out = []
        for host in hosts:
            dev, ev = self.fetch(host)  # leak: ev is rebound by the next host and only the last is tossed
            out.append(dev)
        if out:
            ev.synchronize()
            self.pool.events.toss(ev)
        return out

    def evict(self, dev, host):
        if not self.idle():
            return False
        with torch.cuda.stream(self.d2h):
            host.copy_(dev, non_blocking=True)
        return True

    def idle(self):
        probe = self.pool.events.draw_done()  # leak: the probe is looked at and dropped
        return probe is not None
