"""Module-level pools of CUDA side streams and timing events, and the helpers built on them."""
import atexit
import functools
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager

import torch

_lock = threading.Lock()
_streams = deque()
_n_streams = 0
MAX_STREAMS = 8

_events = []
_live_events = 0


def get_stream(priority=0):
    """A side stream nobody else uses; return it with put_stream()."""
    global _n_streams
    with _lock:
        if _streams:
            return _streams.popleft()
        if _n_streams >= MAX_STREAMS:
            return None
        _n_streams += 1
    return torch.cuda.Stream(priority=priority)


def put_stream(stream):
    with _lock:
        _streams.append(stream)


def new_event():
    global _live_events
    _live_events += 1
    return _events.pop() if _events else torch.cuda.Event(enable_timing=True)


def recycle_event(event):
    global _live_events
    _live_events -= 1
    _events.append(event)


def mark(stream=None):
    """An event recorded now; the caller recycles it."""
    ev = new_event()  # clean: handed to the caller
    ev.record(stream if stream is not None else torch.cuda.current_stream())
    return ev


@atexit.register
def _clear():
    _streams.clear()
    _events.clear()


# ---- side by side ---------------------------------------------------------------------------------


def fan_out(fns):
    """Run independent kernels side by side, two streams at a time."""
    left = get_stream()  # leak: the serial fallback below leaves it behind
    right = get_stream()  # clean: None-checked, put back at the end
    if left is None or right is None:
        for fn in fns:
            fn()
        if right is not None:
            put_stream(right)
        return "serial"
    for i, fn in enumerate(fns):
        with torch.cuda.stream(left if i % 2 == 0 else right):
            fn()
    for s in (left, right):
        s.synchronize()
        put_stream(s)
    return "parallel"


# ---- timing ---------------------------------------------------------------------------------


def timed_min(fn, repeats):
    best = float("inf")
    start = mark()  # clean: recycled after the loop
    for _ in range(repeats):
        start.record()
        fn()
        stop = mark()  # leak: a new one each repeat, nobody recycles it
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    recycle_event(start)
    return best


def timed_chain(fns):
    """Laps: the end of one is the start of the next."""
    laps = []
    prev = mark()  # clean: near miss, recycled as prev in the loop or after it
    for fn in fns:
        fn()
        cur = mark()  # clean: near miss, becomes prev after the old prev is recycled
        cur.synchronize()
        laps.append(prev.elapsed_time(cur))
        recycle_event(prev)
        prev = cur
    recycle_event(prev)
    return laps


def profile(fn):
    """Decorator: keeps the total of milliseconds on the function."""

    @functools.wraps(fn)
    def inner(*args, **kw):
        begin = new_event()  # leak: a disabled profile returns without recycling it
        begin.record()
        out = fn(*args, **kw)
        if not inner.enabled:
            return out
        end = mark()  # clean: recycled below
        end.synchronize()
        inner.total_ms += begin.elapsed_time(end)
        recycle_event(end)
        recycle_event(begin)
        return out

    inner.enabled = False
    inner.total_ms = 0.0
    return inner


class StepTimer:
    """Named sections of a step; events are read lazily at report()."""

    def __init__(self):
        self._open = {}
        self._closed = []
        self.totals = {}

    def enter(self, name):
        self._open[name] = mark()  # clean: near miss, leave() moves it on and report() recycles

    def leave(self, name):
        self._closed.append((name, self._open.pop(name), mark()))  # clean: near miss, report() recycles

    def report(self):
        torch.cuda.synchronize()
        for name, a, b in self._closed:
            self.totals[name] = self.totals.get(name, 0.0) + a.elapsed_time(b)
            recycle_event(a)
            recycle_event(b)
        self._closed.clear()
        return dict(self.totals)


class MemoryTimer:
    """Peak memory between two fences, with a fence event at either end."""

    def __init__(self, device):
        self.device = device
        self.fence = None
        self.peak = 0

    def __enter__(self):
        self.fence = mark()  # leak: __exit__ returns before recycling when nothing was allocated
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, exc_type, exc, tb):
        self.fence.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device)
        if peak == 0:
            return False
        self.peak = max(self.peak, peak)
        recycle_event(self.fence)
        self.fence = None
        return False


@contextmanager
def side_stream():
    s = get_stream()  # clean: put back in finally if there is one
    try:
        if s is None:
            yield torch.cuda.current_stream()
        else:
            with torch.cuda.stream(s):
                yield s
    finally:
        if s is not None:
            torch.cuda.current_stream().wait_stream(s)
            put_stream(s)


def overlapped(compute, comm):
    with side_stream() as s:  # clean: the manager puts it back
        comm()
        ev = mark(s)  # clean: recycled after the wait
    compute()
    torch.cuda.current_stream().wait_event(ev)
    recycle_event(ev)


def overlapped_all(jobs):
    with ExitStack() as stack:
        for job in jobs:
            stack.enter_context(side_stream())  # clean: near miss, the stack exits it
            job()


def wait_all(streams, deadline):
    """Poll events, so that a hung collective does not block the watchdog."""
    pending = [mark(s) for s in streams]  # leak: the time-out returns with what is still pending
    while pending:
        if time.monotonic() > deadline:
            return False
        done = [ev for ev in pending if ev.query()]
        pending = [ev for ev in pending if ev not in done]
        for ev in done:
            recycle_event(ev)
        time.sleep(0.001)
    return True
