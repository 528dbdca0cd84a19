"""Side streams and events for copy / compute overlap, wrapped in context managers."""
from __future__ import annotations

from typing import List, Optional

import torch


class StreamPool:
    def __init__(self, count: int):
        self._idle: List[torch.cuda.Stream] = [torch.cuda.Stream() for _ in range(count)]
        self.closing = False

    def get(self) -> Optional[torch.cuda.Stream]:
        if not self._idle:
            return None
        stream = self._idle.pop()  # leak: when the pool is closing None is returned and the stream is gone
        if self.closing:
            return None
        return stream

    def put(self, stream: torch.cuda.Stream) -> None:
        self._idle.append(stream)


class EventPool:
    def __init__(self, count: int):
        self._idle: List[torch.cuda.Event] = [torch.cuda.Event() for _ in range(count)]
        self.closing = False

    def get(self) -> Optional[torch.cuda.Event]:
        if self.closing or not self._idle:
            return None
        return self._idle.pop()  # clean: handed to the caller

    def put(self, event: torch.cuda.Event) -> None:
        self._idle.append(event)


class CopyScope:
    def __init__(self, pool: StreamPool):
        self.pool = pool
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> "CopyScope":
        self.stream = self.pool.get()  # leak: __exit__ returns early for an OSError in the body, the stream stays out
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.stream is None:
            return False
        if exc_type is not None and issubclass(exc_type, OSError):
            return True
        self.stream.synchronize()
        self.pool.put(self.stream)
        self.stream = None
        return False


class ComputeScope:
    def __init__(self, pool: StreamPool):
        self.pool = pool
        self.stream: Optional[torch.cuda.Stream] = None

    def __enter__(self) -> "ComputeScope":
        self.stream = self.pool.get()  # clean: near miss, the early return of __exit__ comes after put
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.stream is None:
            return False
        self.pool.put(self.stream)
        stream, self.stream = self.stream, None
        if exc_type is not None and issubclass(exc_type, OSError):
            return True
        stream.synchronize()
        return False


class TimedScope:
    """Measures a block with two events, when enabled."""

    def __init__(self, pool: EventPool, enabled: bool):
        self.pool = pool
        self.enabled = enabled
        self.start: Optional[torch.cuda.Event] = None
        self.stop: Optional[torch.cuda.Event] = None
        self.millis = 0.0

    def __enter__(self) -> "TimedScope":
        if self.enabled:
            self.start = self.pool.get()  # clean: near miss, __exit__ returns at once only if not enabled or nothing is held
            self.stop = self.pool.get()  # clean: near miss, __exit__ returns at once only if not enabled or nothing is held
            if self.start is not None:
                self.start.record()
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        if not self.enabled:
            return
        if self.start is not None and self.stop is not None:
            self.stop.record()
            self.stop.synchronize()
            self.millis = self.start.elapsed_time(self.stop)
        for event in (self.start, self.stop):
            if event is not None:
                self.pool.put(event)
        self.start = self.stop = None


class FenceScope:
    """Orders a block before later work on the given stream."""

    def __init__(self, pool: EventPool, target: torch.cuda.Stream):
        self.pool = pool
        self.target = target
        self.before: Optional[torch.cuda.Event] = None
        self.after: Optional[torch.cuda.Event] = None

    def __enter__(self) -> "FenceScope":
        self.before = self.pool.get()  # leak: if there is no second event __exit__ returns without putting this one
        self.after = self.pool.get()  # clean: put by __exit__ whenever it is not None
        if self.before is not None:
            self.before.record()
        return self

    def __exit__(self, exc_type, exc, tb) -> None:
        if self.after is None:
            return
        self.after.record()
        self.target.wait_event(self.after)
        self.pool.put(self.after)
        if self.before is not None:
            self.pool.put(self.before)


def overlap_copy(pool: StreamPool, src: torch.Tensor, dst: torch.Tensor) -> bool:
    with ComputeScope(pool) as scope:  # clean: the scope puts the stream back on every exit
        if scope.stream is None:
            return False
        with torch.cuda.stream(scope.stream):
            dst.copy_(src, non_blocking=True)
    return True


def record_point(pool: EventPool, stream: torch.cuda.Stream) -> bool:
    event = pool.get()  # leak: an event that has already completed is not put back
    if event is None:
        return False
    event.record(stream)
    if event.query():
        return True
    event.synchronize()
    pool.put(event)
    return True


def drain_point(pool: EventPool, stream: torch.cuda.Stream) -> bool:
    event = pool.get()  # clean: near miss, both the done and the waiting exit put it back
    if event is None:
        return False
    event.record(stream)
    done = event.query()
    if done:
        pool.put(event)
        return True
    event.synchronize()
    pool.put(event)
    return False
