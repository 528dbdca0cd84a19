"""Pools of CUDA events and communication streams, and the overlap engine on top of them."""
from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist


class EventPool:
    def __init__(self, timing: bool = False):
        self._events: list[torch.cuda.Event] = []
        self._timing = timing
        self._lock = threading.Lock()

    def get_event(self) -> torch.cuda.Event:
        with self._lock:
            if self._events:
                return self._events.pop()  # clean: returned to the caller
        return torch.cuda.Event(enable_timing=self._timing)

    def put_event(self, ev: torch.cuda.Event) -> None:
        with self._lock:
            self._events.append(ev)


class StreamRing:
    """A bounded set of high priority streams. ``lend`` blocks until one is idle."""

    def __init__(self, n: int):
        self._q: "queue.Queue[torch.cuda.Stream]" = queue.Queue()
        for _ in range(n):
            self._q.put(torch.cuda.Stream(priority=-1))

    def lend(self, timeout: float | None = None) -> torch.cuda.Stream | None:
        try:
            return self._q.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            return None

    def lend_idle(self) -> torch.cuda.Stream | None:
        """A stream that has no work queued, if the next one is such."""
        try:
            s = self._q.get_nowait()  # leak: a stream that is busy is neither returned nor put back
        except queue.Empty:
            return None
        if not s.query():
            return None
        return s

    def reclaim(self, s: torch.cuda.Stream) -> None:
        self._q.put(s)

    def synchronize_all(self) -> None:
        seen = []
        while True:
            try:
                s = self._q.get_nowait()  # clean: near miss, every stream goes into seen and back to the queue
            except queue.Empty:
                break
            s.synchronize()
            seen.append(s)
        for s in seen:
            self._q.put(s)


class Pending(NamedTuple):
    tag: str
    work: object
    event: torch.cuda.Event
    stream: torch.cuda.Stream


class OverlapEngine:
    def __init__(self, events: EventPool, streams: StreamRing, group):
        self.events = events
        self.streams = streams
        self.group = group
        self.pending: deque[Pending] = deque()
        self.profile = False
        self._span: tuple | None = None
        self._marks: dict[str, torch.cuda.Event] = {}
        self._laps: dict[str, torch.cuda.Event] = {}

    def launch(self, tag: str, t: torch.Tensor) -> None:
        stream = self.streams.lend()  # clean: in pending until reap() or finish()
        ev = self.events.get_event()  # clean: in pending until reap() or finish()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work = dist.all_reduce(t, group=self.group, async_op=True)
            ev.record(stream)
        self.pending.append(Pending(tag, work, ev, stream))

    def _end(self, p: Pending) -> None:
        self.events.put_event(p.event)
        self.streams.reclaim(p.stream)

    def reap(self) -> list[str]:
        done = []
        while self.pending and self.pending[0].event.query():
            p = self.pending.popleft()
            self._end(p)
            done.append(p.tag)
        return done

    def finish(self) -> None:
        for p in self.pending:
            p.work.wait()
            self._end(p)
        self.pending.clear()

    def run_on_side(self, fn: Callable[[], None], deadline: float) -> bool:
        stream = self.streams.lend(timeout=deadline)  # clean: reclaimed in finally
        if stream is None:
            return False
        try:
            with torch.cuda.stream(stream):
                fn()
        finally:
            self.streams.reclaim(stream)
        return True

    def run_timed(self, fn: Callable[[], None]) -> float:
        start = self.events.get_event()  # clean: put back after elapsed_time
        stop = self.events.get_event()  # leak: only the start event is put back
        start.record()
        fn()
        stop.record()
        stop.synchronize()
        ms = start.elapsed_time(stop)
        self.events.put_event(start)
        return ms

    # -- correlated guards ------------------------------------------------------

    def open_span(self) -> None:
        if self.profile and self._span is None:
            self._span = (self.events.get_event(), self.events.get_event())  # clean: near miss, both in _span until close_span()
            self._span[0].record()

    def close_span(self) -> float:
        if self._span is None:
            return 0.0
        first, last = self._span
        self._span = None
        last.record()
        last.synchronize()
        ms = first.elapsed_time(last)
        self.events.put_event(first)
        self.events.put_event(last)
        return ms

    def mark(self, name: str) -> None:
        ev = self.events.get_event()  # leak: a second mark of the same name replaces the first event
        ev.record()
        self._marks[name] = ev

    def lap(self, name: str) -> None:
        old = self._laps.pop(name, None)
        if old is not None:
            self.events.put_event(old)
        ev = self.events.get_event()  # clean: near miss, the old lap was put back, clear_marks() ends this one
        ev.record()
        self._laps[name] = ev

    def clear_marks(self) -> None:
        for table in (self._marks, self._laps):
            while table:
                _, ev = table.popitem()
                self.events.put_event(ev)

    # -- chains -----------------------------------------------------------------

    def fence(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        ev = self.events.get_event()  # clean: returned to the caller
        ev.record(stream)
        return ev

    def order(self, before: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        after.wait_event(self.fence(before))  # leak: the fence's event is dropped after the wait was queued

    def order_sync(self, before: torch.cuda.Stream) -> None:
        ev = self.fence(before)  # clean: put back after the host waited
        ev.synchronize()
        self.events.put_event(ev)

    def all_gather_chunks(self, chunks: list[torch.Tensor], outs: list[torch.Tensor]) -> int:
        sent = 0
        for chunk, out in zip(chunks, outs):
            stream = self.streams.lend(timeout=1.0)  # leak: not reclaimed for empty chunks
            if stream is None:
                break
            if chunk.numel() == 0:
                continue
            with torch.cuda.stream(stream):
                dist.all_gather_into_tensor(out, chunk, group=self.group)
            self.streams.reclaim(stream)
            sent += 1
        return sent

    def scatter_chunks(self, chunks: list[torch.Tensor], out: torch.Tensor) -> int:
        sent = 0
        for chunk in chunks:
            stream = self.streams.lend()  # clean: reclaimed on both branches
            if chunk.numel() == 0:
                self.streams.reclaim(stream)
                continue
            with torch.cuda.stream(stream):
                dist.reduce_scatter_tensor(out, chunk, group=self.group)
            self.streams.reclaim(stream)
            sent += 1
        return sent
