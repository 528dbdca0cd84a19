"""Pools of CUDA streams and events for overlapped copies."""
from __future__ import annotations

import collections
import logging
from typing import Any, Callable, Deque, Optional

import torch

_logger = logging.getLogger(__name__)


class EventPool:
    def __init__(self, factory: Callable[[], Any] = lambda: torch.cuda.Event(blocking=True)) -> None:
        self._factory = factory
        self._events: Deque[Any] = collections.deque()
        self.live = 0

    def obtain(self) -> Any:
        self.live += 1
        if self._events:
            return self._events.popleft()
        return self._factory()

    def recycle(self, ev: Any) -> None:
        self.live -= 1
        self._events.append(ev)


class CopyOp:
    def __init__(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.src = src
        self.dst = dst
        self.event: Any = None
        self.on_done: list[Callable[[], None]] = []


class CopyScheduler:
    def __init__(self, events: EventPool, stream: Any, profile: bool = False) -> None:
        self.events = events
        self.stream = stream
        self.profile = profile
        self.ops: Deque[CopyOp] = collections.deque()
        self.start_event: Any = None
        self.fence: Any = None

    def enqueue(self, src: torch.Tensor, dst: torch.Tensor) -> CopyOp:
        op = CopyOp(src, dst)
        dst.copy_(src, non_blocking=True)
        op.event = self.events.obtain()  # clean: poll() or drain() recycles what is queued
        op.event.record(self.stream)
        self.ops.append(op)
        return op

    def enqueue_with_callback(self, src: torch.Tensor, dst: torch.Tensor, then: Callable[[], None]) -> CopyOp:
        op = CopyOp(src, dst)
        dst.copy_(src, non_blocking=True)
        ev = self.events.obtain()  # clean: near miss, the closure in on_done recycles it
        ev.record(self.stream)

        def finish() -> None:
            ev.synchronize()
            self.events.recycle(ev)
            then()

        op.on_done.append(finish)
        self.ops.append(op)
        return op

    def poll(self) -> int:
        n = 0
        while self.ops and (self.ops[0].event is None or self.ops[0].event.query()):
            self._complete(self.ops.popleft())
            n += 1
        return n

    def _complete(self, op: CopyOp) -> None:
        for cb in op.on_done:
            cb()
        if op.event is not None:
            self.events.recycle(op.event)
            op.event = None

    def drain(self) -> None:
        while self.ops:
            op = self.ops.popleft()
            if op.event is not None:
                op.event.synchronize()
            self._complete(op)

    def timed_copy(self, src: torch.Tensor, dst: torch.Tensor) -> Optional[float]:
        start = self.events.obtain()  # clean: near miss, obtained and recycled whether profiling or not
        start.record(self.stream)
        dst.copy_(src, non_blocking=True)
        elapsed = None
        if self.profile:
            end = self.events.obtain()  # clean: obtained and recycled inside the same branch
            end.record(self.stream)
            end.synchronize()
            elapsed = start.elapsed_time(end)
            self.events.recycle(end)
        self.events.recycle(start)
        return elapsed

    def timed_region(self, fn: Callable[[], None]) -> Optional[float]:
        start = self.events.obtain()  # leak: without profiling the function returns before the recycle
        end = self.events.obtain()  # leak: without profiling the function returns before the recycle
        start.record(self.stream)
        fn()
        end.record(self.stream)
        if not self.profile:
            return None
        end.synchronize()
        ms = start.elapsed_time(end)
        self.events.recycle(start)
        self.events.recycle(end)
        return ms

    def set_fence(self) -> None:
        ev = self.events.obtain()  # clean: near miss, the former fence is recycled before it is replaced
        ev.record(self.stream)
        if self.fence is not None:
            self.events.recycle(self.fence)
        self.fence = ev

    def clear_fence(self) -> None:
        if self.fence is not None:
            self.events.recycle(self.fence)
        self.fence = None

    def mark_start(self) -> None:
        self.start_event = self.events.obtain()  # leak: since_start() forgets the field when the event is not done
        self.start_event.record(self.stream)

    def since_start(self) -> float:
        ev, self.start_event = self.start_event, None
        if ev is None or not ev.query():
            return -1.0
        now = self.events.obtain()  # clean: recycled together with the start event
        now.record(self.stream)
        now.synchronize()
        ms = ev.elapsed_time(now)
        self.events.recycle(now)
        self.events.recycle(ev)
        return ms

    def sync(self) -> None:
        ev = self.events.obtain()  # clean: recycled after the wait
        ev.record(self.stream)
        ev.synchronize()
        self.events.recycle(ev)

    def is_idle(self) -> bool:
        ev = self.events.obtain()  # leak: query() answers and the event is dropped
        ev.record(self.stream)
        return bool(ev.query())
