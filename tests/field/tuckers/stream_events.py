"""Side streams and timing events for overlap; both are pooled because creating them costs a driver call."""
import contextlib
import functools
import threading
from typing import Generator

import torch

_lock = threading.Lock()
_events: list = []
_streams: list = []
_live_events = 0


def acquire_event(timing: bool = True):
    global _live_events
    with _lock:
        _live_events += 1
        if _events:
            return _events.pop()
    return torch.cuda.Event(enable_timing=timing)


def release_event(ev) -> None:
    global _live_events
    with _lock:
        _live_events -= 1
        _events.append(ev)


def acquire_stream(priority: int = 0):
    with _lock:
        for i, (prio, st) in enumerate(_streams):
            if prio == priority:
                del _streams[i]
                return st
    return torch.cuda.Stream(priority=priority)


def release_stream(st, priority: int = 0) -> None:
    with _lock:
        _streams.append((priority, st))


@contextlib.contextmanager
def side_stream(priority: int = 0):
    st = acquire_stream(priority)  # clean: released in the finally
    try:
        with torch.cuda.stream(st):
            yield st
    finally:
        release_stream(st, priority)


@contextlib.contextmanager
def timed(sink: list, enabled: bool = True):
    start = acquire_event()  # clean: released at the end on both settings
    stop = acquire_event()  # leak: released only when enabled
    if enabled:
        start.record()
    yield
    if enabled:
        stop.record()
        stop.synchronize()
        sink.append(start.elapsed_time(stop))
        release_event(stop)
    release_event(start)


def marked():
    """Event recorded on the current stream; the caller releases it."""
    ev = acquire_event()  # clean: handed to the caller
    ev.record()
    return ev


def fence(streams) -> None:
    ev = marked()  # clean: released after every stream waits on it
    for st in streams:
        st.wait_event(ev)
    release_event(ev)


def is_idle(stream) -> bool:
    with torch.cuda.stream(stream):
        ev = marked()  # leak: queried and dropped
    return ev.query()


def with_events(n: int):
    """Decorator: passes n events as the first argument and takes them back."""

    def wrap(fn):
        @functools.wraps(fn)
        def inner(*args, **kw):
            evs = [acquire_event() for _ in range(n)]  # clean: near miss, all are released in the finally
            try:
                return fn(evs, *args, **kw)
            finally:
                for ev in evs:
                    release_event(ev)

        return inner

    return wrap


@with_events(2)
def time_call(evs, fn, *args) -> float:
    evs[0].record()
    fn(*args)
    evs[1].record()
    evs[1].synchronize()
    return evs[0].elapsed_time(evs[1])


def lap_times(fns) -> Generator[float, None, None]:
    prev = marked()  # clean: near miss, each lap releases it before prev moves on, the last in the finally
    try:
        for fn in fns:
            fn()
            cur = marked()  # clean: near miss, becomes prev, released by the next lap or the finally
            cur.synchronize()
            ms = prev.elapsed_time(cur)
            release_event(prev)
            prev = cur
            yield ms
    finally:
        release_event(prev)


def first_slow(fns, limit_ms: float) -> int:
    prev = marked()  # clean: released before prev moves on, or on the early return
    for i, fn in enumerate(fns):
        fn()
        cur = marked()  # leak: the early return releases only the start of the lap
        cur.synchronize()
        if prev.elapsed_time(cur) > limit_ms:
            release_event(prev)
            return i
        release_event(prev)
        prev = cur
    release_event(prev)
    return -1


class Overlap:
    """Runs host-to-device copies on side streams and joins them at the end of a step."""

    def __init__(self, width: int):
        self.lanes = [acquire_stream(-1) for _ in range(width)]  # clean: close releases every lane
        self.main = acquire_stream(0)  # leak: close returns the lanes only
        self.joins: list = []

    def copy(self, i: int, dst, src) -> None:
        lane = self.lanes[i % len(self.lanes)]
        with torch.cuda.stream(lane):
            dst.copy_(src, non_blocking=True)
            self.joins.append(marked())  # clean: near miss, join releases every event of the list

    def join(self) -> None:
        for ev in self.joins:
            torch.cuda.current_stream().wait_event(ev)
            release_event(ev)
        self.joins.clear()

    def close(self) -> None:
        self.join()
        while self.lanes:
            release_stream(self.lanes.pop(), -1)
        self.main = None


def prefetch(batches, device):
    """Yields device batches one ahead of the consumer."""
    with side_stream(-1) as st:  # clean: released when the generator ends
        ahead = None
        for b in batches:
            nxt = b.to(device, non_blocking=True)
            if ahead is not None:
                torch.cuda.current_stream().wait_stream(st)
                yield ahead
            ahead = nxt
        if ahead is not None:
            yield ahead


def host_callback(pool_exec, work, on_ms):
    start = marked()  # clean: near miss, the done callback releases it
    stop = acquire_event()  # clean: near miss, the done callback releases it
    fut = pool_exec.submit(work)

    def done(_):
        stop.record()
        stop.synchronize()
        on_ms(start.elapsed_time(stop))
        release_event(start)
        release_event(stop)

    fut.add_done_callback(done)
    return fut


def benchmark(fn, iters: int, warm: int) -> list:
    sink: list = []
    for i in range(iters + warm):
        with timed(sink, enabled=True):  # clean: enabled, so that both events are released
            fn()
    return sink[warm:]
