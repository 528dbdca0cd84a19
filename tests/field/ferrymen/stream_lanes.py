"""CUDA streams and events for overlapping communication with compute, borrowed from small pools."""
from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Any, Callable, Iterator, Optional

import torch


class EventPool:
    """Events are cheap to record but slow to create."""

    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self._cold: list[torch.cuda.Event] = []
        self.made = 0

    def get(self) -> torch.cuda.Event:
        if self._cold:
            return self._cold.pop()
        self.made += 1
        return torch.cuda.Event(enable_timing=self.timing)

    def put(self, event: torch.cuda.Event) -> None:
        self._cold.append(event)


class LanePool:
    """A fixed number of side streams ("lanes")."""

    def __init__(self, lanes: int, priority: int = 0) -> None:
        self._streams = collections.deque(torch.cuda.Stream(priority=priority) for _ in range(lanes))
        self._cv = threading.Condition()

    def borrow(self, wait: Optional[float] = None) -> Optional[torch.cuda.Stream]:
        with self._cv:
            if not self._cv.wait_for(lambda: len(self._streams) > 0, wait):
                return None
            return self._streams.popleft()

    def give_back(self, lane: torch.cuda.Stream) -> None:
        with self._cv:
            self._streams.append(lane)
            self._cv.notify()

    @contextlib.contextmanager
    def lane(self) -> Iterator[torch.cuda.Stream]:
        stream = self.borrow()  # clean: given back in finally
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            self.give_back(stream)


class Overlap:
    def __init__(self, lanes: LanePool, events: EventPool, clocks: EventPool) -> None:
        self.lanes = lanes
        self.events = events
        self.clocks = clocks
        self.pending: collections.deque = collections.deque()
        self.marks: dict[str, torch.cuda.Event] = {}
        self.spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.totals: dict[str, float] = collections.Counter()

    def copy_out(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        with self.lanes.lane() as lane:  # clean: the manager gives it back
            lane.wait_stream(torch.cuda.default_stream())
            dst.copy_(src, non_blocking=True)
            src.record_stream(lane)

    def copy_chain(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        """Copies in order, ordered by events across two lanes."""
        a = self.lanes.borrow()  # clean: given back after the loop
        b = self.lanes.borrow(wait=0.0)  # clean: near miss, None or given back under the same test
        last = None
        for i, (src, dst) in enumerate(pairs):
            lane = b if b is not None and i % 2 else a
            with torch.cuda.stream(lane):
                if last is not None:
                    lane.wait_event(last)
                    self.events.put(last)
                dst.copy_(src, non_blocking=True)
                last = self.events.get()  # clean: near miss, put in the next turn or after the loop
                last.record(lane)
        if last is not None:
            last.synchronize()
            self.events.put(last)
        if b is not None:
            self.lanes.give_back(b)
        self.lanes.give_back(a)
        return len(pairs)

    def fence_all(self, lanes: list[torch.cuda.Stream]) -> None:
        main = torch.cuda.current_stream()
        for lane in lanes:
            done = self.events.get()  # leak: one per lane, none is put
            done.record(lane)
            main.wait_event(done)

    # deferred work ---------------------------------------------------------------------------------
    def later(self, fn: Callable[[], Any]) -> None:
        lane = self.lanes.borrow()  # clean: near miss, pending until reap() gives it back
        done = self.events.get()  # leak: reap() gives back the lane only
        with torch.cuda.stream(lane):
            value = fn()
            done.record(lane)
        self.pending.append((lane, done, value))

    def reap(self, block: bool = False) -> list:
        values = []
        while self.pending:
            lane, done, value = self.pending[0]
            if block:
                done.synchronize()
            elif not done.query():
                break
            self.pending.popleft()
            self.lanes.give_back(lane)
            values.append(value)
        return values

    def try_side(self, fn: Callable[[], torch.Tensor], small: bool) -> torch.Tensor:
        lane = None
        if not small:
            lane = self.lanes.borrow(wait=0.01)  # clean: near miss, the test on lane covers both guards
        if lane is None:
            return fn()
        with torch.cuda.stream(lane):
            out = fn()
        torch.cuda.current_stream().wait_stream(lane)
        self.lanes.give_back(lane)
        return out

    def race(self, fast: Callable[[], torch.Tensor], slow: Callable[[], torch.Tensor], limit: float):
        """Start both, take the first that is ready."""
        one = self.lanes.borrow(wait=limit)  # clean: given back on each way
        if one is None:
            return slow()
        two = self.lanes.borrow(wait=limit)  # leak: the fast answer returns without it
        if two is None:
            self.lanes.give_back(one)
            return slow()
        with torch.cuda.stream(one):
            quick = fast()
        with torch.cuda.stream(two):
            careful = slow()
        one.synchronize()
        self.lanes.give_back(one)
        if bool(torch.isfinite(quick).all()):
            return quick
        two.synchronize()
        self.lanes.give_back(two)
        return careful

    # timing ----------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = self.clocks.get()  # clean: near miss, spans are put by collect()
        end = self.clocks.get()  # clean: near miss, spans are put by collect()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self.spans.append((name, begin, end))

    def collect(self) -> dict[str, float]:
        for name, begin, end in self.spans:
            end.synchronize()
            self.totals[name] += begin.elapsed_time(end)
            self.clocks.put(begin)
            self.clocks.put(end)
        self.spans = []
        return dict(self.totals)

    def mark(self, name: str) -> None:
        event = self.clocks.get()  # leak: a mark of the same name is replaced without put
        event.record()
        self.marks[name] = event

    def since(self, name: str) -> float:
        start = self.marks.pop(name, None)
        if start is None:
            return 0.0
        now = self.clocks.get()  # clean: put below
        now.record()
        now.synchronize()
        ms = start.elapsed_time(now)
        self.clocks.put(now)
        self.clocks.put(start)
        return ms

class LaneWorker(threading.Thread):
    """A thread with a lane of its own that runs closures until told to stop."""

    def __init__(self, lanes: LanePool, idle_limit: float) -> None:
        super().__init__(daemon=True)
        self.lanes = lanes
        self.idle_limit = idle_limit
        self.work: collections.deque = collections.deque()
        self.stopping = threading.Event()

    def run(self) -> None:
        lane = self.lanes.borrow()  # leak: an idle worker returns with its lane
        quiet_since = time.monotonic()
        while not self.stopping.is_set():
            if not self.work:
                if time.monotonic() - quiet_since > self.idle_limit:
                    return
                time.sleep(0.001)
                continue
            fn = self.work.popleft()
            with torch.cuda.stream(lane):
                fn()
            quiet_since = time.monotonic()
        lane.synchronize()
        self.lanes.give_back(lane)
