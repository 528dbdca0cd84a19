"""Streams and events are expensive to create: both come from pools and return after completion."""
from __future__ import annotations

import logging
import queue
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Callable, Protocol

import torch

log = logging.getLogger("serve.streams")


class EventPool:
    def __init__(self, timing: bool = False) -> None:
        self._spare: deque[torch.cuda.Event] = deque()
        self._timing = timing
        self.live = 0

    def get(self) -> torch.cuda.Event:
        self.live += 1
        if self._spare:
            return self._spare.pop()
        return torch.cuda.Event(enable_timing=self._timing)

    def put(self, ev: torch.cuda.Event) -> None:
        self.live -= 1
        self._spare.append(ev)

    def stamp(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        ev = self.get()  # clean: recorded and handed to the caller
        ev.record(stream)
        return ev


class StreamPool:
    def __init__(self, n: int) -> None:
        self._q: queue.Queue[torch.cuda.Stream] = queue.Queue()
        for _ in range(n):
            self._q.put(torch.cuda.Stream())

    def checkout(self, timeout: float | None = None) -> torch.cuda.Stream | None:
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            return None

    def checkin(self, s: torch.cuda.Stream) -> None:
        self._q.put(s)


class Work(Protocol):
    def run(self, stream: torch.cuda.Stream) -> torch.Tensor: ...
    def cancelled(self) -> bool: ...


@dataclass
class Inflight:
    work: Work
    stream: torch.cuda.Stream
    done: torch.cuda.Event
    out: torch.Tensor
    on_done: Callable[[torch.Tensor], None]


class Executor:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.inflight: list[Inflight] = []

    def submit(self, work: Work, on_done: Callable[[torch.Tensor], None]) -> bool:
        stream = self.streams.checkout(timeout=0.05)  # clean: stored in Inflight, reap checks it in
        if stream is None:
            return False
        with torch.cuda.stream(stream):
            out = work.run(stream)
        done = self.events.stamp(stream)  # leak: reap gives back streams only, the events are lost
        self.inflight.append(Inflight(work, stream, done, out, on_done))
        return True

    def submit_unless_cancelled(self, work: Work, on_done: Callable) -> bool:
        stream = self.streams.checkout(timeout=0.05)  # leak: cancelled work returns with the stream
        if stream is None or work.cancelled():
            return False
        with torch.cuda.stream(stream):
            out = work.run(stream)
        done = torch.cuda.Event()
        done.record(stream)
        self.inflight.append(Inflight(work, stream, done, out, on_done))
        return True

    def reap(self) -> int:
        still: list[Inflight] = []
        finished = 0
        for item in self.inflight:
            if not item.done.query():
                still.append(item)
                continue
            self.streams.checkin(item.stream)
            item.on_done(item.out)
            finished += 1
        self.inflight = still
        return finished


class CopyEngine:
    """One stream for copies; each copy gets an event others can wait for."""

    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.stream = streams.checkout()  # clean: shutdown checks it in
        self.pending: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self.callbacks: list[Callable[[], None]] = []

    def copy(self, src: torch.Tensor, device: str) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            dst = src.to(device, non_blocking=True)
        ev = self.events.stamp(self.stream)  # clean: near miss, kept in pending, trim and shutdown put it
        self.pending.append((ev, src))
        return dst

    def copy_then(self, src: torch.Tensor, device: str, then: Callable[[], None]) -> torch.Tensor:
        with torch.cuda.stream(self.stream):
            dst = src.to(device, non_blocking=True)
        ev = self.events.stamp(self.stream)  # clean: near miss, the callback list puts it back
        self.callbacks.append(partial(self._settle, ev, then))
        return dst

    def _settle(self, ev: torch.cuda.Event, then: Callable[[], None]) -> None:
        ev.synchronize()
        self.events.put(ev)
        then()

    def fire(self) -> None:
        todo, self.callbacks = self.callbacks, []
        for cb in todo:
            cb()

    def trim(self) -> None:
        while self.pending and self.pending[0][0].query():
            ev, _ = self.pending.popleft()
            self.events.put(ev)

    def shutdown(self) -> None:
        self.fire()
        while self.pending:
            ev, _ = self.pending.popleft()
            ev.synchronize()
            self.events.put(ev)
        self.streams.checkin(self.stream)


def best_of(events: EventPool, stream: torch.cuda.Stream, fn: Callable[[], None], rounds: int) -> float:
    best = float("inf")
    start = events.stamp(stream)  # clean: put back after the loop
    for i in range(rounds):
        fn()
        stop = events.stamp(stream)  # leak: only the last round's event is put back
        stop.synchronize()
        ms = start.elapsed_time(stop) / (i + 1)
        best = min(best, ms)
    events.put(start)
    if rounds:
        events.put(stop)
    return best


def join_all(events: EventPool, main: torch.cuda.Stream, sides: list[torch.cuda.Stream]) -> None:
    marks = [events.stamp(s) for s in sides]  # clean: near miss, put back by the second loop
    for ev in marks:
        main.wait_event(ev)
    for ev in marks:
        events.put(ev)


def fence(events: EventPool, main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    main.wait_event(events.stamp(side))  # leak: the event goes into wait_event and no one puts it back


def run_sharded(pool: StreamPool, shards: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    taken: list[torch.cuda.Stream] = []
    outs: list[torch.Tensor] = []
    for shard in shards:
        s = pool.checkout(timeout=1.0)  # leak: on timeout it breaks and returns [] with the streams in taken
        if s is None:
            break
        taken.append(s)
        with torch.cuda.stream(s):
            outs.append(shard())
    if len(outs) < len(shards):
        log.warning("ran %d of %d shards", len(outs), len(shards))
        return []
    for s in taken:
        s.synchronize()
        pool.checkin(s)
    return outs
