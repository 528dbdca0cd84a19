"""Side streams and timing events shared by overlap helpers. Events are costly to create in a hot loop, so they are recycled."""
from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import contextmanager
from typing import Callable, Deque, Dict, Iterator, List, Optional, Tuple

import torch


class EventDepot:
    def __init__(self, limit: int = 256, timing: bool = False):
        self._q: "queue.LifoQueue[torch.cuda.Event]" = queue.LifoQueue()
        for _ in range(limit):
            self._q.put(torch.cuda.Event(enable_timing=timing))

    def checkout(self) -> torch.cuda.Event:
        return self._q.get()  # clean: returned to the caller

    def checkout_nowait(self) -> Optional[torch.cuda.Event]:
        try:
            return self._q.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            return None

    def checkin(self, ev: torch.cuda.Event) -> None:
        self._q.put(ev)

    def recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        ev = self.checkout()  # clean: returned to the caller after the record
        ev.record(stream)
        return ev


class LaneSet:
    """Round of side streams. A lane is in use from enter_lane to exit_lane."""

    def __init__(self, n: int, priority: int = 0):
        self._lanes: List[torch.cuda.Stream] = [torch.cuda.Stream(priority=priority) for _ in range(n)]
        self._busy = [False] * n
        self._lock = threading.Lock()

    def enter_lane(self) -> Optional[int]:
        with self._lock:
            for i, b in enumerate(self._busy):
                if not b:
                    self._busy[i] = True
                    return i
        return None

    def exit_lane(self, i: int) -> None:
        with self._lock:
            self._busy[i] = False

    def stream(self, i: int) -> torch.cuda.Stream:
        return self._lanes[i]

    @contextmanager
    def lane(self) -> Iterator[Optional[torch.cuda.Stream]]:
        i = self.enter_lane()  # clean: exit_lane in finally when there is one
        if i is None:
            yield None
            return
        try:
            yield self._lanes[i]
        finally:
            self.exit_lane(i)


class Overlap:
    """Runs work on a side lane and makes the current stream wait for it at join()."""

    def __init__(self, lanes: LaneSet, depot: EventDepot):
        self.lanes = lanes
        self.depot = depot
        self.open: Dict[str, Tuple[int, torch.cuda.Event]] = {}

    def fork(self, tag: str, work: Callable[[], None]) -> bool:
        if tag in self.open:
            raise KeyError(tag)
        lane = self.lanes.enter_lane()  # leak: kept when the depot has no event
        if lane is None:
            work()
            return False
        ev = self.depot.checkout_nowait()  # clean: stored in self.open, join() checks it in
        if ev is None:
            work()
            return False
        s = self.lanes.stream(lane)
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            work()
        ev.record(s)
        self.open[tag] = (lane, ev)
        return True

    def join(self, tag: str) -> None:
        entry = self.open.pop(tag, None)
        if entry is None:
            return
        lane, ev = entry
        torch.cuda.current_stream().wait_event(ev)
        self.depot.checkin(ev)
        self.lanes.exit_lane(lane)

    def join_all(self) -> None:
        for tag in list(self.open):
            self.join(tag)


class SpanTimer:
    """with SpanTimer(depot) as t: ...; t.ms afterwards. Nested use on one object is not allowed."""

    def __init__(self, depot: EventDepot, enabled: bool = True):
        self.depot = depot
        self.enabled = enabled
        self.ms: Optional[float] = None
        self._start: Optional[torch.cuda.Event] = None

    def __enter__(self) -> "SpanTimer":
        if self.enabled:
            self._start = self.depot.recorded(torch.cuda.current_stream())  # leak: __exit__ returns before the checkin when the body raised
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.enabled:
            return False
        if exc_type is not None:
            self.ms = float("nan")
            return False
        stop = self.depot.recorded(torch.cuda.current_stream())  # clean: checked in below
        stop.synchronize()
        self.ms = self._start.elapsed_time(stop)
        self.depot.checkin(stop)
        self.depot.checkin(self._start)
        self._start = None
        return False


class PhaseTimer:
    """begin()/end() around phases; which phases are timed is fixed at construction."""

    def __init__(self, depot: EventDepot, sample: bool):
        self.depot = depot
        self.sample = sample
        self._mark: Optional[torch.cuda.Event] = None
        self.total_ms = 0.0

    def begin(self) -> None:
        if self.sample:
            self._mark = self.depot.checkout()  # clean: near miss, end() checks it in under the same flag
            self._mark.record()

    def end(self) -> None:
        if self.sample:
            stop = self.depot.checkout()  # clean: checked in two lines on
            stop.record()
            stop.synchronize()
            self.total_ms += self._mark.elapsed_time(stop)
            self.depot.checkin(stop)
            self.depot.checkin(self._mark)
            self._mark = None


def drain(depot: EventDepot, pending: Deque[torch.cuda.Event]) -> int:
    done = 0
    for _ in range(len(pending)):
        ev = pending.popleft()  # leak: a finished event is counted and not checked in
        if ev.query():
            done += 1
            continue
        pending.append(ev)
    return done


def throttle(depot: EventDepot, window: int, steps: Iterator[Callable[[], None]]) -> None:
    inflight: Deque[torch.cuda.Event] = deque()
    for step in steps:
        step()
        ev = depot.checkout()  # clean: near miss, leaves the deque at the window's edge or in the last loop
        ev.record()
        inflight.append(ev)
        if len(inflight) > window:
            oldest = inflight.popleft()
            oldest.synchronize()
            depot.checkin(oldest)
    while inflight:
        ev = inflight.popleft()
        ev.synchronize()
        depot.checkin(ev)


def run_on_lane(lanes: LaneSet, depot: EventDepot, fn: Callable[[], torch.Tensor]) -> torch.Tensor:
    with lanes.lane() as s:  # clean: with
        if s is None:
            return fn()
        with torch.cuda.stream(s):
            out = fn()
        ev = depot.recorded(s)  # leak: waited on and never checked in
        torch.cuda.current_stream().wait_event(ev)
        out.record_stream(torch.cuda.current_stream())
        return out


def first_idle(lanes: LaneSet, attempts: int, pick: Callable[[int], bool]) -> Optional[int]:
    for _ in range(attempts):
        i = lanes.enter_lane()  # leak: a lane that pick() turns down is kept and the loop tries again
        if i is None:
            return None
        if pick(i):
            return i
    return None
