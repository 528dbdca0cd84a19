"""Device-side timing: pooled CUDA events, ranges and Chrome trace output."""
from __future__ import annotations

import json
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, TextIO, Tuple

try:
    import torch
except ImportError:
    torch = None


class HostEvent:
    """Stand-in on machines without a device."""

    def __init__(self) -> None:
        self.t = 0.0

    def record(self) -> None:
        self.t = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "HostEvent") -> float:
        return (other.t - self.t) * 1e3


class EventPool:
    def __init__(self) -> None:
        self._spare: List[Any] = []
        self.created = 0

    def fetch_event(self) -> Any:
        if self._spare:
            return self._spare.pop()
        self.created += 1
        if torch is not None and torch.cuda.is_available():
            return torch.cuda.Event(enable_timing=True)
        return HostEvent()

    def restore_event(self, ev: Any) -> None:
        self._spare.append(ev)

    def recorded(self) -> Any:
        ev = self.fetch_event()  # clean: recorded and returned to the caller
        ev.record()
        return ev


class RangeStack:
    def __init__(self, pool: EventPool) -> None:
        self.pool = pool
        self._stack: List[Tuple[str, Any]] = []
        self.rows: List[Tuple[str, float]] = []

    def push(self, name: str) -> None:
        self._stack.append((name, self.pool.recorded()))  # clean: on the stack, pop() restores it

    def pop(self) -> None:
        name, start = self._stack.pop()
        end = self.pool.recorded()  # clean: restored below
        self.rows.append((name, start.elapsed_time(end)))
        self.pool.restore_event(start)
        self.pool.restore_event(end)


class Stopwatch:
    def __init__(self, pool: EventPool) -> None:
        self.pool = pool
        self._open: Dict[str, Any] = {}
        self.totals: Dict[str, float] = {}

    def start(self, name: str) -> None:
        self._open[name] = self.pool.recorded()  # leak: starting an open name again overwrites its event

    def stop(self, name: str) -> Optional[float]:
        end = self.pool.recorded()  # leak: a name that is not open returns before the restore
        start = self._open.pop(name, None)
        if start is None:
            return None
        ms = start.elapsed_time(end)
        self.totals[name] = self.totals.get(name, 0.0) + ms
        for ev in (start, end):
            self.pool.restore_event(ev)
        return ms


class DeferredTimer:
    """Pairs whose end event may not have completed yet."""

    def __init__(self, pool: EventPool, limit: int = 256) -> None:
        self.pool = pool
        self.limit = limit
        self._pending: Deque[Tuple[str, Any, Any]] = deque()
        self._recent: Deque[Any] = deque(maxlen=limit)
        self.rows: List[Tuple[str, float]] = []

    def wrap(self, name: str, fn: Callable[[], Any]) -> Any:
        start = self.pool.recorded()  # clean: near miss, pending, drain() restores, the oldest one restored when full
        out = fn()
        end = self.pool.recorded()  # clean: near miss, pending, drain() restores, the oldest one restored when full
        if len(self._pending) == self.limit:
            _, a, b = self._pending.popleft()
            self.pool.restore_event(a)
            self.pool.restore_event(b)
        self._pending.append((name, start, end))
        return out

    def drain(self) -> None:
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.popleft()
            self.rows.append((name, start.elapsed_time(end)))
            self.pool.restore_event(start)
            self.pool.restore_event(end)

    def mark(self) -> None:
        self._recent.append(self.pool.recorded())  # leak: the bounded deque discards its oldest mark silently

    def flush_marks(self) -> int:
        n = len(self._recent)
        while self._recent:
            self.pool.restore_event(self._recent.pop())
        return n


def time_iterations(fn: Callable[[], Any], pool: EventPool, iters: int) -> float:
    starts = [pool.fetch_event() for _ in range(iters)]  # clean: restored after the loop
    ends = [pool.fetch_event() for _ in range(iters)]  # clean: restored after the loop
    for s, e in zip(starts, ends):
        s.record()
        fn()
        e.record()
    total = sum(s.elapsed_time(e) for s, e in zip(starts, ends))
    for ev in starts + ends:
        pool.restore_event(ev)
    return total / iters


def time_steady(fn: Callable[[], Any], pool: EventPool, iters: int, warmup: int) -> float:
    marks = [pool.fetch_event() for _ in range(iters + warmup + 1)]  # leak: only the marks after the warm-up are restored
    for m in marks[:-1]:
        m.record()
        fn()
    marks[-1].record()
    marks = marks[warmup:]
    total = marks[0].elapsed_time(marks[-1])
    for m in marks:
        pool.restore_event(m)
    return total / iters


def profile_call(fn: Callable[[], Any], pool: EventPool, enabled: bool, sink: List[float]) -> Any:
    start = pool.recorded() if enabled else None  # clean: near miss, same flag at the restore
    out = fn()
    if enabled:
        end = pool.recorded()  # clean: restored with the start
        sink.append(start.elapsed_time(end))
        pool.restore_event(end)
        pool.restore_event(start)
    return out


def profile_slow(fn: Callable[[], Any], pool: EventPool, threshold_ms: float, sink: List[float]) -> Any:
    start = pool.recorded()  # leak: fast calls return without restoring it
    end = pool.fetch_event()  # leak: fast calls return without restoring it
    out = fn()
    end.record()
    ms = start.elapsed_time(end)
    if ms < threshold_ms:
        return out
    sink.append(ms)
    pool.restore_event(start)
    pool.restore_event(end)
    return out


class TraceWriter:
    def __init__(self, path: str) -> None:
        self.path = path
        self.events: List[Dict[str, Any]] = []
        self._fh: Optional[TextIO] = None

    def __enter__(self) -> "TraceWriter":
        self._fh = open(self.path, "w")  # leak: __exit__ returns early when there were no events
        return self

    def add(self, name: str, ms: float) -> None:
        self.events.append({"name": name, "ph": "X", "dur": ms * 1e3})

    def __exit__(self, exc_type, exc, tb) -> None:
        if not self.events:
            return
        json.dump({"traceEvents": self.events}, self._fh)
        self._fh.close()


def export_rows(rows: List[Tuple[str, float]], path: str) -> int:
    with TraceWriter(path) as w:  # clean: with block, the writer owns its file
        for name, ms in rows:
            w.add(name, ms)
    return len(rows)


def export_summary(totals: Dict[str, float], path: str) -> bool:
    fh = open(path, "w")  # leak: an unserialisable total is logged and survives with the file open
    try:
        json.dump(totals, fh)
    except TypeError as err:
        print("summary not written:", err)
        return False
    fh.close()
    return True


def append_csv(rows: List[Tuple[str, float]], path: str) -> None:
    fh = open(path, "a")  # clean: near miss, both returns pass through finally
    try:
        if not rows:
            return
        for name, ms in rows:
            fh.write(f"{name},{ms:.3f}\n")
    finally:
        fh.close()


if __name__ == "__main__":
    import os
    import tempfile

    ep = EventPool()
    st = RangeStack(ep)
    st.push("attn"), st.pop()
    sw = Stopwatch(ep)
    sw.start("mlp"), sw.stop("mlp")
    dt = DeferredTimer(ep, 2)
    for _ in range(4):
        dt.wrap("x", lambda: None)
    dt.drain(), dt.mark(), dt.flush_marks()
    print(time_iterations(lambda: None, ep, 3) >= 0, time_steady(lambda: None, ep, 3, 1) >= 0, ep.created)
    profile_call(lambda: None, ep, True, []), profile_slow(lambda: None, ep, -1.0, [])
    with tempfile.TemporaryDirectory() as d:
        export_rows(st.rows, os.path.join(d, "t.json"))
        print(export_summary(sw.totals, os.path.join(d, "s.json")), append_csv(st.rows, os.path.join(d, "r.csv")))
