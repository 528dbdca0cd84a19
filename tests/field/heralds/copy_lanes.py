# Streams and events for overlapped weight offload.  torch.cuda.Event is cheap but
# not free, and a stream per layer kills the driver, so both are pooled.
import time
from collections import deque

import torch

NL = 4


class NoLane(Exception):
    pass


class Events:
    def __init__(self, n=32):
        self.q = deque(torch.cuda.Event(enable_timing=True) for _ in range(n))
        self.made = n

    def get(self):
        if self.q:
            return self.q.popleft()  # clean: caller's
        self.made += 1
        return torch.cuda.Event(enable_timing=True)  # clean: a new one, caller's

    def put(self, e):
        self.q.append(e)

    def trim(self, keep):
        busy = []
        while len(self.q) > keep:
            e = self.q.popleft()  # clean: an idle one is destroyed and uncounted, one in use goes back after the loop
            if e.query():
                self.made -= 1
                del e
            else:
                busy.append(e)
        self.q.extend(busy)


class Lanes:
    def __init__(self, n=NL):
        self.s = [torch.cuda.Stream() for _ in range(n)]

    def take(self):
        if not self.s:
            raise NoLane()
        return self.s.pop()  # clean: caller's

    def take_quiet(self):
        """A lane with no queued work."""
        for _ in range(len(self.s)):
            s = self.s.pop(0)  # clean: near miss, a lane with work goes to the end of the list again
            if s.query():
                return s
            self.s.append(s)
        return None

    def give(self, s):
        self.s.append(s)


class Span:
    """with Span(evs) as t: ...; t.ms()"""

    def __init__(self, evs):
        self.evs = evs
        self.took = 0.0

    def __enter__(self):
        self.a = self.evs.get()  # leak: __exit__ returns first when the body raised, and Offload.step handles that exception
        self.b = self.evs.get()  # leak: the same path
        self.a.record()
        return self

    def __exit__(self, et, ev, tb):
        if et is not None:
            return False
        self.b.record()
        self.b.synchronize()
        self.took = self.a.elapsed_time(self.b)
        self.evs.put(self.a)
        self.evs.put(self.b)
        return False


class Offload:
    """Keeps `window` layers on the device, the rest in pinned memory."""

    def __init__(self, layers, window=2):
        self.layers = layers
        self.window = window
        self.evs = Events()
        self.lanes = Lanes()
        self.coming = {}
        self.going = deque()
        self.ms = []

    # in
    def prefetch(self, i):
        if i in self.coming or i >= len(self.layers):
            return
        s = self.lanes.take()  # leak: run() with skipped layers never waits for them and clears the dict
        e = self.evs.get()  # leak: with the lane in the entry of a skipped layer
        with torch.cuda.stream(s):
            self.layers[i].to_device(non_blocking=True)
        e.record(s)
        self.coming[i] = s, e

    def wait(self, i):
        if i not in self.coming:
            self.layers[i].to_device()
            return
        s, e = self.coming.pop(i)
        torch.cuda.current_stream().wait_event(e)
        self.evs.put(e)
        self.lanes.give(s)

    # out
    def retire(self, i):
        e = self.evs.get()  # clean: near miss, in the deque until poll or drain has seen it
        e.record()
        self.going.append((e, i))
        self.poll()

    def poll(self):
        while self.going and self.going[0][0].query():
            e, i = self.going.popleft()
            self.layers[i].to_host()
            self.evs.put(e)

    def drain(self):
        for e, i in self.going:
            e.synchronize()
            self.layers[i].to_host()
            self.evs.put(e)
        self.going.clear()

    def run(self, x, skip=()):
        for i in range(self.window):
            self.prefetch(i)
        for i, layer in enumerate(self.layers):
            if i in skip:
                continue
            self.wait(i)
            self.prefetch(i + self.window)
            x = layer(x)
            self.retire(i)
        self.coming.clear()
        self.drain()
        return x

    def step(self, x):
        sp = Span(self.evs)
        try:
            with sp:
                x = self.run(x)
        except NoLane:
            torch.cuda.synchronize()
            for l in self.layers:
                l.to_device()
                x = l(x)
        else:
            self.ms.append(sp.took)
        return x


def bandwidth(evs, lanes, src, dst, reps=10):
    s = lanes.take_quiet()  # clean: None or given by the finally
    if s is None:
        return None
    a, b = evs.get(), evs.get()  # clean: put in the finally
    try:
        with torch.cuda.stream(s):
            a.record(s)
            for _ in range(reps):
                dst.copy_(src, non_blocking=True)
            b.record(s)
        b.synchronize()
        return src.numel() * src.element_size() * reps / a.elapsed_time(b) * 1e-6
    finally:
        evs.put(a)
        evs.put(b)
        lanes.give(s)


def duplex(evs, lanes, up, down):
    s1 = lanes.take()  # leak: NoLane of the second take
    s2 = lanes.take()  # clean: finally
    try:
        with torch.cuda.stream(s1):
            up()
        with torch.cuda.stream(s2):
            down()
        s1.synchronize()
        s2.synchronize()
    finally:
        lanes.give(s2)
        lanes.give(s1)


def capture(lanes, fn, x, warm=3):
    """CUDA graph of fn on a side lane, or None if fn cannot be captured."""
    s = lanes.take()  # leak: the except returns None before give
    s.wait_stream(torch.cuda.current_stream())
    g = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(s):
            for _ in range(warm):
                fn(x)
        with torch.cuda.graph(g, stream=s):
            y = fn(x)
    except RuntimeError as err:
        print("capture:", err)
        return None
    torch.cuda.current_stream().wait_stream(s)
    lanes.give(s)
    return g, y


class Fence:
    """Counts users of an event that several consumers wait for."""

    def __init__(self, evs, users):
        self.evs = evs
        self.n = users
        self.e = evs.get() if users else None  # clean: near miss, put by the last done(), and there is none without users

    def done(self):
        self.n -= 1
        if self.n == 0:
            self.evs.put(self.e)
            self.e = None


def broadcast(evs, lanes, t, outs):
    f = Fence(evs, len(outs))  # clean: one done() per output
    if f.e is None:
        return
    f.e.record()
    for o in outs:
        torch.cuda.current_stream().wait_event(f.e)
        o.copy_(t, non_blocking=True)
        f.done()


def until(evs, deadline, ready):
    """Spin until ready() or the deadline; returns the event that marks the point."""
    e = None
    while time.monotonic() < deadline:
        e = evs.get()  # leak: each turn that is not ready yet binds a new event over the last one
        e.record()
        e.synchronize()
        if ready():
            return e
    if e is not None:
        evs.put(e)
    return None
