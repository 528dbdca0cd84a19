"""Stream and event pools used to overlap attention compute with communication."""
from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Callable, Deque, Dict, Iterator, List, Optional, Sequence

import torch
from torch import Tensor


class StreamPool:
    def __init__(self, size: int, priority: int = 0) -> None:
        self._idle: Deque[torch.cuda.Stream] = deque(torch.cuda.Stream(priority=priority) for _ in range(size))
        self._cond = threading.Condition()
        self._busy = 0

    def acquire(self, timeout: Optional[float] = None) -> Optional[torch.cuda.Stream]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._cond:
            while not self._idle:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._cond.wait(left)
            stream = self._idle.popleft()  # clean: counted as busy and handed out
            self._busy += 1
            return stream

    def release(self, stream: torch.cuda.Stream) -> None:
        with self._cond:
            self._busy -= 1
            self._idle.append(stream)
            self._cond.notify()

    @contextlib.contextmanager
    def scoped(self) -> Iterator[torch.cuda.Stream]:
        stream = self.acquire()  # clean: released in the finally clause of the context manager
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            self.release(stream)


class EventPool:
    def __init__(self, timing: bool = False) -> None:
        self.timing = timing
        self._spare: List[torch.cuda.Event] = []

    def acquire(self) -> torch.cuda.Event:
        if self._spare:
            return self._spare.pop()  # clean: handed to the caller
        return torch.cuda.Event(enable_timing=self.timing)

    def release(self, event: torch.cuda.Event) -> None:
        self._spare.append(event)


class StreamLease:
    """Holds a stream for the length of a with block."""

    def __init__(self, pool: StreamPool, sync: bool = True) -> None:
        self.pool = pool
        self.sync = sync
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> torch.cuda.Stream:
        self.stream = self.pool.acquire()  # clean: near miss, both ways through __exit__ release it
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        stream, self.stream = self.stream, None
        if exc_type is not None or not self.sync:
            self.pool.release(stream)
            return False
        stream.synchronize()
        self.pool.release(stream)
        return False


class FencedLease(StreamLease):
    """Like StreamLease but orders the stream after the current one."""

    def __enter__(self) -> torch.cuda.Stream:
        self.stream = self.pool.acquire()  # leak: __exit__ returns early without releasing when sync is off
        self.stream.wait_stream(torch.cuda.current_stream())
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.sync:
            torch.cuda.current_stream().wait_stream(self.stream)
            return False
        self.stream.synchronize()
        self.pool.release(self.stream)
        self.stream = None
        return False


class OverlapScheduler:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self._markers: Dict[str, torch.cuda.Event] = {}
        self._inflight: Deque[torch.cuda.Event] = deque()

    def mark(self, name: str) -> None:
        event = self.events.acquire()  # leak: marking the same name again overwrites an event that was never released
        event.record()
        self._markers[name] = event

    def wait_for(self, name: str) -> None:
        event = self._markers.pop(name, None)
        if event is None:
            return
        event.synchronize()
        self.events.release(event)

    def submit(self, work: Callable[[], None]) -> None:
        with self.streams.scoped() as stream:  # clean: the with block releases the stream
            work()
            event = self.events.acquire()  # clean: near miss, queued and released in throttle or flush
            event.record(stream)
            self._inflight.append(event)

    def throttle(self, limit: int) -> None:
        while len(self._inflight) > limit:
            event = self._inflight.popleft()
            event.synchronize()
            self.events.release(event)

    def flush(self) -> None:
        self.throttle(0)
        for name in list(self._markers):
            self.wait_for(name)

    def timed(self, work: Callable[[], Tensor]) -> float:
        begin = self.events.acquire()  # clean: released after the measurement
        end = self.events.acquire()  # clean: near miss, released through the loop over both
        begin.record()
        work()
        end.record()
        end.synchronize()
        elapsed = begin.elapsed_time(end)
        for event in (begin, end):
            self.events.release(event)
        return elapsed

    def elapsed_since(self, name: str) -> float:
        now = self.events.acquire()  # leak: an unknown marker returns zero before the release
        now.record()
        begin = self._markers.get(name)
        if begin is None:
            return 0.0
        now.synchronize()
        elapsed = begin.elapsed_time(now)
        self.events.release(now)
        return elapsed

    def best_of(self, work: Callable[[], Tensor], repeats: int) -> float:
        best = float("inf")
        begin = self.events.acquire()  # clean: near miss, used again in every repeat and released after the loop
        for _ in range(repeats):
            end = self.events.acquire()  # leak: each repeat rebinds end and only the begin event is released
            begin.record()
            work()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end))
        self.events.release(begin)
        return best

    def fan_out(self, tasks: Sequence[Callable[[], None]], timeout: float) -> int:
        taken: List[torch.cuda.Stream] = []
        for task in tasks:
            stream = self.streams.acquire(timeout)  # leak: the release loop leaves out the first stream taken
            if stream is None:
                break
            taken.append(stream)
            with torch.cuda.stream(stream):
                task()
        done = len(taken)
        for stream in taken[1:]:
            stream.synchronize()
            self.streams.release(stream)
        return done
