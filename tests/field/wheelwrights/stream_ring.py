"""Side streams and timing events for the overlap scheduler.

torch makes events cheaply but not for free, and a stream that is made per step fragments
the caching allocator.  Both are therefore kept here: streams by priority in small
stacks, events in one stack that grows up to a cap.
"""
from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any, Callable

import torch


class EventDepot:
    def __init__(self, cap: int = 256) -> None:
        self._stack: list[torch.cuda.Event] = []
        self._made = 0
        self.cap = cap

    def draw(self) -> torch.cuda.Event | None:
        if self._stack:
            return self._stack.pop()  # clean: returned to the caller
        if self._made >= self.cap:
            return None
        self._made += 1
        return torch.cuda.Event(enable_timing=True)

    def stow(self, *events: torch.cuda.Event | None) -> None:
        self._stack.extend(e for e in events if e is not None)


class StreamDepot:
    def __init__(self, per_priority: int = 4) -> None:
        self._by_prio: dict[int, list[torch.cuda.Stream]] = {
            p: [torch.cuda.Stream(priority=p) for _ in range(per_priority)] for p in (0, -1)
        }
        self._home: dict[int, int] = {}
        self._lock = threading.Lock()
        self.fallbacks = 0

    def hire(self, prio: int = 0) -> torch.cuda.Stream | None:
        with self._lock:
            if not self._by_prio[prio]:
                return None
            s = self._by_prio[prio].pop()  # clean: returned, with its home noted
            self._home[id(s)] = prio
            return s

    def hire_idle(self, prio: int = 0) -> torch.cuda.Stream | None:
        """Only a stream whose earlier work is done."""
        with self._lock:
            if not self._by_prio[prio]:
                return None
            s = self._by_prio[prio].pop()  # leak: a stream that is still busy is dropped
            if not s.query():
                self.fallbacks += 1
                return None
            self._home[id(s)] = prio
            return s

    def dismiss(self, s: torch.cuda.Stream) -> None:
        with self._lock:
            prio = self._home.pop(id(s))
            self._by_prio[prio].append(s)

    def hire_best(self) -> torch.cuda.Stream | None:
        s = self.hire(-1)  # clean: returned, or None before the second try
        if s is None:
            s = self.hire(0)  # clean: returned to the caller
        return s


class OnStream:
    """Runs its body on a hired stream, or on the current one if `optional`."""

    def __init__(self, depot: StreamDepot, optional: bool = False) -> None:
        self.depot = depot
        self.optional = optional
        self.stream: torch.cuda.Stream | None = None
        self._ctx = None

    def __enter__(self):
        self.stream = self.depot.hire()  # clean: near miss, the early return of __exit__ is for None only
        if self.stream is None:
            if not self.optional:
                raise RuntimeError("no stream left")
            return None
        self._ctx = torch.cuda.stream(self.stream)
        self._ctx.__enter__()
        return self.stream

    def __exit__(self, *exc) -> bool:
        if self.stream is None:
            return False
        self._ctx.__exit__(*exc)
        self.depot.dismiss(self.stream)
        self.stream = None
        return False


class Timer:
    """Pairs of events, resolved later so that the step is not synchronised."""

    def __init__(self, depot: EventDepot) -> None:
        self.depot = depot
        self.open: dict[str, torch.cuda.Event] = {}
        self.pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.ms: dict[str, float] = {}

    def start(self, name: str) -> None:
        if name in self.open:
            return
        ev = self.depot.draw()  # clean: moved into self.open, which stop() or reset() empties
        if ev is None:
            return
        ev.record()
        self.open[name] = ev

    def stop(self, name: str) -> None:
        begin = self.open.pop(name, None)
        if begin is None:
            return
        end = self.depot.draw()  # clean: queued with begin, or None and begin is stowed
        if end is None:
            self.depot.stow(begin)
            return
        end.record()
        self.pending.append((name, begin, end))

    def resolve(self) -> None:
        while self.pending and self.pending[0][2].query():
            name, begin, end = self.pending.popleft()
            self.ms[name] = begin.elapsed_time(end)
            self.depot.stow(begin, end)

    def reset(self) -> None:
        self.depot.stow(*self.open.values())
        self.open.clear()
        while self.pending:
            _, b, e = self.pending.popleft()
            self.depot.stow(b, e)


class RestartTimer:
    """Like Timer, but a second start() moves the beginning."""

    def __init__(self, depot: EventDepot) -> None:
        self.depot = depot
        self.begin: torch.cuda.Event | None = None

    def start(self) -> None:
        self.begin = self.depot.draw()  # leak: a second start() overwrites the event of the first
        if self.begin is not None:
            self.begin.record()

    def stop(self) -> float | None:
        if self.begin is None:
            return None
        end = self.depot.draw()  # clean: stowed with begin
        if end is not None:
            end.record()
            end.synchronize()
            ms = self.begin.elapsed_time(end)
        else:
            ms = None
        self.depot.stow(self.begin, end)
        self.begin = None
        return ms


def timed(depot: EventDepot):
    def wrap(fn: Callable[..., Any]):
        @functools.wraps(fn)
        def inner(*args, **kw):
            a = depot.draw()  # leak: not stowed when the second event is missing
            if a is None:
                return fn(*args, **kw)
            b = depot.draw()  # clean: stowed after the call, or None
            if b is None:
                return fn(*args, **kw)
            a.record()
            out = fn(*args, **kw)
            b.record()
            inner.last = (a, b)
            b.synchronize()
            inner.ms = a.elapsed_time(b)
            depot.stow(a, b)
            return out

        return inner

    return wrap


def timed_loosely(depot: EventDepot, fn: Callable[[], Any]) -> tuple[Any, float]:
    a, b = depot.draw(), depot.draw()  # clean: near miss, stow() takes both and skips None
    try:
        if a is not None:
            a.record()
        out = fn()
        if a is None or b is None:
            return out, 0.0
        b.record()
        b.synchronize()
        return out, a.elapsed_time(b)
    finally:
        depot.stow(a, b)


class Overlap:
    def __init__(self, streams: StreamDepot) -> None:
        self.streams = streams

    def copy_in(self, host: torch.Tensor) -> torch.Tensor:
        with OnStream(self.streams, optional=True):  # clean: with block
            return host.to("cuda", non_blocking=True)

    def prefetch(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        out = []
        for p in parts:
            s = self.streams.hire_idle()  # leak: continue on an empty part skips dismiss
            if s is None:
                out.append(p.cuda())
                continue
            if p.numel() == 0:
                out.append(p)
                continue
            with torch.cuda.stream(s):
                out.append(p.to("cuda", non_blocking=True))
            self.streams.dismiss(s)
        return out

    def run_urgent(self, fn: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        s = self.streams.hire_best()  # leak: None from fn returns before dismiss
        if s is None:
            return fn()
        with torch.cuda.stream(s):
            out = fn()
            if out is None:
                return None
        out.record_stream(s)
        self.streams.dismiss(s)
        return out
