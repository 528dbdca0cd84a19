"""Pools of CUDA streams and events for overlapped transfers, and what is built from them."""
from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable

import torch


class EventPool:
    def __init__(self, prefill: int = 32, timing: bool = False):
        self._timing = timing
        self._q = deque(torch.cuda.Event(enable_timing=timing) for _ in range(prefill))
        self.made = prefill

    def get(self) -> torch.cuda.Event:
        if self._q:
            return self._q.popleft()
        self.made += 1
        return torch.cuda.Event(enable_timing=self._timing)

    def put(self, ev: torch.cuda.Event) -> None:
        self._q.append(ev)

    def recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event recorded on the stream; goes back by put()."""
        ev = self.get()  # clean: handed on
        ev.record(stream)
        return ev


class StreamPool:
    """A handful of side streams. A stream may be used by one owner at a time."""

    def __init__(self, count: int):
        self._streams = [torch.cuda.Stream() for _ in range(count)]
        self._taken = [False] * count
        self._cond = threading.Condition()

    def claim(self) -> int:
        with self._cond:
            while all(self._taken):
                self._cond.wait()
            i = self._taken.index(False)
            self._taken[i] = True
            return i

    def claim_if_free(self) -> int | None:
        with self._cond:
            if all(self._taken):
                return None
            i = self._taken.index(False)
            self._taken[i] = True
            return i

    def unclaim(self, i: int) -> None:
        with self._cond:
            self._taken[i] = False
            self._cond.notify()

    def __getitem__(self, i: int) -> torch.cuda.Stream:
        return self._streams[i]

    @contextlib.contextmanager
    def using(self):
        i = self.claim()  # clean: unclaimed when the block ends
        try:
            with torch.cuda.stream(self._streams[i]):
                yield self._streams[i]
        finally:
            self.unclaim(i)


class SideCopy:
    """`with SideCopy(pool, events) as c: c.copy(...)`; the main stream waits for the copies at the end."""

    def __init__(self, pool: StreamPool, events: EventPool, wait: bool = True):
        self.pool = pool
        self.events = events
        self.wait = wait
        self.index = -1
        self.copies = 0

    def __enter__(self) -> "SideCopy":
        self.index = self.pool.claim()  # clean: near miss, __exit__ unclaims before any of its returns
        return self

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self.pool[self.index]):
            dst.copy_(src, non_blocking=True)
        self.copies += 1

    def __exit__(self, *exc) -> bool:
        stream = self.pool[self.index]
        self.pool.unclaim(self.index)
        if not self.wait or self.copies == 0:
            return False
        ev = self.events.recorded(stream)  # clean: put after the wait was enqueued
        torch.cuda.current_stream().wait_event(ev)
        self.events.put(ev)
        return False


class TimedRegion:
    def __init__(self, events: EventPool, sink: Callable[[float], None], enabled: bool = True):
        self.events = events
        self.sink = sink
        self.enabled = enabled
        self.begin: torch.cuda.Event | None = None

    def __enter__(self) -> "TimedRegion":
        self.begin = self.events.recorded(torch.cuda.current_stream())  # leak: not put when disabled
        return self

    def __exit__(self, *exc) -> bool:
        if not self.enabled:
            return False
        end = self.events.recorded(torch.cuda.current_stream())  # clean: put at the end of __exit__
        end.synchronize()
        self.sink(self.begin.elapsed_time(end))
        self.events.put(self.begin)
        self.events.put(end)
        return False


@dataclass
class Transfer:
    dst: torch.Tensor
    src: torch.Tensor
    done: torch.cuda.Event | None = None
    tag: str = ""


class TransferQueue:
    def __init__(self, events: EventPool, stream: torch.cuda.Stream):
        self.events = events
        self.stream = stream
        self.running: deque[Transfer] = deque()
        self.by_tag: dict[str, torch.cuda.Event] = {}

    def start(self, t: Transfer) -> None:
        with torch.cuda.stream(self.stream):
            t.dst.copy_(t.src, non_blocking=True)
        t.done = self.events.recorded(self.stream)  # clean: poll or drain puts it back
        self.running.append(t)

    def poll(self) -> int:
        n = 0
        while self.running and self.running[0].done.query():
            t = self.running.popleft()
            self.events.put(t.done)
            t.done = None
            n += 1
        return n

    def drain(self) -> None:
        while self.running:
            t = self.running.popleft()
            t.done.synchronize()
            self.events.put(t.done)

    def mark(self, tag: str) -> None:
        old = self.by_tag.pop(tag, None)
        if old is not None:
            self.events.put(old)
        self.by_tag[tag] = self.events.recorded(self.stream)  # leak: wait_tag pops it, no put

    def wait_tag(self, tag: str) -> bool:
        ev = self.by_tag.pop(tag, None)
        if ev is None:
            return False
        torch.cuda.current_stream().wait_event(ev)
        return True


def overlapped_cast(pool: StreamPool, src: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    out = []
    with pool.using() as stream:  # clean: the context manager unclaims it
        for t in src:
            out.append(t.to(dtype, non_blocking=True))
        torch.cuda.current_stream().wait_stream(stream)
    return out


def copy_all(pool: StreamPool, events: EventPool, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    with SideCopy(pool, events) as c:  # clean: __exit__ unclaims it
        for d, s in pairs:
            c.copy(d, s)
        return c.copies


def split_copy(pool: StreamPool, dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Halves on two streams where there are two, otherwise False."""
    a = pool.claim_if_free()  # leak: index 0 is falsy, so the stream 0 takes the path of a refusal
    if not a:
        return False
    b = pool.claim_if_free()  # clean: unclaimed below, and None is tested as such
    if b is None:
        pool.unclaim(a)
        return False
    half = src.shape[0] // 2
    for i, part in ((a, slice(0, half)), (b, slice(half, None))):
        with torch.cuda.stream(pool[i]):
            dst[part].copy_(src[part], non_blocking=True)
    for i in (a, b):
        pool[i].synchronize()
        pool.unclaim(i)
    return True


def fan(pool: StreamPool, tasks: list[Callable[[], None]], width: int) -> int:
    lanes = [pool.claim() for _ in range(width)]  # leak: zip gives back only as many lanes as there are tasks
    for lane, task in zip(lanes, tasks):
        with torch.cuda.stream(pool[lane]):
            task()
        pool[lane].synchronize()
        pool.unclaim(lane)
    return min(width, len(tasks))


def wait_any(events: EventPool, streams: list[torch.cuda.Stream], spins: int) -> int:
    """Index of the first stream found idle, -1 after `spins` polls."""
    evs = [events.recorded(s) for s in streams]  # leak: the return with an index leaves all of them out
    for _ in range(spins):
        for i, ev in enumerate(evs):
            if ev.query():
                return i
    for ev in evs:
        events.put(ev)
    return -1
