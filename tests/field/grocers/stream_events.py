"""Side streams and events of the offload engine."""
from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Callable, Deque, Dict, Iterator, List, Optional, Tuple

import torch


class StreamPool:
    """Side streams. lend() raises when all are out."""

    def __init__(self, n: int):
        self._idle: Deque[torch.cuda.Stream] = deque(torch.cuda.Stream() for _ in range(n))
        self._lock = threading.Lock()

    def lend(self) -> torch.cuda.Stream:
        with self._lock:
            if not self._idle:
                raise LookupError("no idle stream")
            return self._idle.popleft()

    def give_back(self, s: torch.cuda.Stream) -> None:
        with self._lock:
            self._idle.append(s)


class EventPool:
    """Events. pick() gives None over the limit."""

    def __init__(self, limit: int):
        self._left = limit
        self._idle: List[torch.cuda.Event] = []

    def pick(self) -> Optional[torch.cuda.Event]:
        if self._idle:
            return self._idle.pop()
        if self._left == 0:
            return None
        self._left -= 1
        return torch.cuda.Event()

    def lay(self, ev: torch.cuda.Event) -> None:
        self._idle.append(ev)


@contextlib.contextmanager
def side_stream(pool: StreamPool) -> Iterator[torch.cuda.Stream]:
    s = pool.lend()  # clean: finally of the context manager
    try:
        with torch.cuda.stream(s):
            yield s
    finally:
        pool.give_back(s)


class CopyQueue:
    """Outstanding copies as (event, callback), polled by the engine loop."""

    def __init__(self, events: EventPool):
        self.events = events
        self.queue: Deque[Tuple[torch.cuda.Event, Optional[Callable[[], None]]]] = deque()

    def push(self, dst: torch.Tensor, src: torch.Tensor, then: Optional[Callable[[], None]] = None) -> bool:
        ev = self.events.pick()  # leak: poll skips the lay for entries without a callback
        if ev is None:
            return False
        dst.copy_(src, non_blocking=True)
        ev.record()
        self.queue.append((ev, then))
        return True

    def poll(self) -> int:
        n = 0
        while self.queue and self.queue[0][0].query():
            ev, then = self.queue.popleft()
            n += 1
            if then is None:
                continue
            then()
            self.events.lay(ev)
        return n


class FencedCopies:
    def __init__(self, events: EventPool):
        self.events = events
        self.fences: Dict[int, torch.cuda.Event] = {}

    def fence(self, ptr: int) -> None:
        ev = self.fences.get(ptr)
        if ev is None:
            ev = self.events.pick()  # clean: near miss, an event present is recorded again
            if ev is None:
                torch.cuda.current_stream().synchronize()
                return
            self.fences[ptr] = ev
        ev.record()

    def forget(self, ptr: int) -> None:
        ev = self.fences.pop(ptr, None)
        if ev is not None:
            self.events.lay(ev)

    def forget_all(self) -> None:
        for ptr in list(self.fences):
            self.forget(ptr)


class LaneSet:
    """One stream per copy direction, made on demand; retune changes their number."""

    def __init__(self, streams: StreamPool):
        self.streams = streams
        self.lanes: Dict[str, torch.cuda.Stream] = {}
        self.wide: List[torch.cuda.Stream] = []

    def lane(self, name: str) -> torch.cuda.Stream:
        if name not in self.lanes:
            self.lanes[name] = self.streams.lend()  # clean: near miss, guarded by the key, close gives all back
        return self.lanes[name]

    def retune(self, n: int) -> None:
        self.wide = [self.streams.lend() for _ in range(n)]  # leak: the former list is rebound at each retune (by meaning)

    def close(self) -> None:
        for s in list(self.lanes.values()) + self.wide:
            self.streams.give_back(s)
        self.lanes.clear()
        self.wide.clear()


class StepTimer:
    """Start/stop events of the phases of a step."""

    def __init__(self, events: EventPool):
        self.events = events
        self.open: Dict[str, torch.cuda.Event] = {}
        self.spans: List[Tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, phase: str) -> None:
        if phase in self.open:
            return
        ev = self.events.pick()  # leak: stop pops the start event and returns when no stop event is left
        if ev is None:
            return
        ev.record()
        self.open[phase] = ev

    def stop(self, phase: str) -> None:
        begin = self.open.pop(phase, None)
        if begin is None:
            return
        end = self.events.pick()  # clean: goes into spans with the start, collect lays both
        if end is None:
            return
        end.record()
        self.spans.append((phase, begin, end))

    def collect(self) -> Dict[str, float]:
        out: Dict[str, float] = {}
        for phase, begin, end in self.spans:
            end.synchronize()
            out[phase] = out.get(phase, 0.0) + begin.elapsed_time(end)
            self.events.lay(begin)
            self.events.lay(end)
        self.spans.clear()
        return out


class Offloader:
    """Runs offload jobs on streams of their own."""

    def __init__(self, streams: StreamPool):
        self.streams = streams
        self.busy: Dict[int, torch.cuda.Stream] = {}
        self.parked: Dict[int, torch.cuda.Stream] = {}

    def launch(self, job: int, fn: Callable[[], None]) -> bool:
        if job in self.busy:
            return False
        try:
            s = self.streams.lend()  # clean: near miss, busy or parked, reap and unpark give it back
        except LookupError:
            return False
        with torch.cuda.stream(s):
            fn()
        self.busy[job] = s
        return True

    def park(self, job: int) -> None:
        s = self.busy.pop(job, None)
        if s is None:
            return
        old = self.parked.pop(job, None)
        if old is not None:
            self.streams.give_back(old)
        self.parked[job] = s

    def unpark(self) -> None:
        while self.parked:
            _, s = self.parked.popitem()
            s.synchronize()
            self.streams.give_back(s)

    def reap(self) -> None:
        for job in [j for j, s in self.busy.items() if s.query()]:
            self.streams.give_back(self.busy.pop(job))


def run_chunks(streams: StreamPool, chunks: List[torch.Tensor], fn) -> int:
    lent: List[torch.cuda.Stream] = []
    try:
        for c in chunks:
            s = streams.lend()  # leak: when the pool runs dry the ones in lent are not given back
            lent.append(s)
            with torch.cuda.stream(s):
                fn(c)
    except LookupError:
        return len(lent)
    for s in lent:
        s.synchronize()
        streams.give_back(s)
    return len(chunks)


def time_once(events: EventPool, fn: Callable[[], None]) -> Optional[float]:
    a = events.pick()  # leak: when only the second is None the first is not laid back
    b = events.pick()  # clean: laid after the measurement
    if a is None or b is None:
        return None
    a.record()
    fn()
    b.record()
    b.synchronize()
    ms = a.elapsed_time(b)
    events.lay(a)
    events.lay(b)
    return ms
