"""Pool of side streams and events for overlapped copies (falls back to dummies on CPU)."""
from __future__ import annotations

import functools
import logging
import weakref
from typing import Any, Callable, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)


class DummyStream:
    def __init__(self, ident: int) -> None:
        self.ident = ident

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: DummyStream) -> None:
        pass


class StreamPool:
    def __init__(self, n: int) -> None:
        self._all = [DummyStream(i) for i in range(n)]
        self._busy: set[int] = set()

    def lease(self) -> DummyStream:
        for s in self._all:
            if s.ident not in self._busy:
                self._busy.add(s.ident)
                return s
        s = DummyStream(len(self._all))
        self._all.append(s)
        self._busy.add(s.ident)
        return s

    def unlease(self, s: DummyStream) -> None:
        self._busy.discard(s.ident)


class EventPool:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event | object] = []

    def get_event(self) -> object:
        if self._events:
            return self._events.pop()  # clean: goes to the caller
        return object()

    def put_event(self, ev: object) -> None:
        self._events.append(ev)


def on_side_stream(pool: StreamPool) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def deco(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def inner(*args: P.args, **kwargs: P.kwargs) -> R:
            s = pool.lease()  # clean: unleased in finally
            try:
                return fn(*args, **kwargs)
            finally:
                s.synchronize()
                pool.unlease(s)
        return inner
    return deco


def fire_and_forget(pool: StreamPool, fn: Callable[[], Any]) -> Any:
    s = pool.lease()  # leak: a None result returns without unlease
    out = fn()
    if out is None:
        return None
    s.synchronize()
    pool.unlease(s)
    return out


class Copier:
    def __init__(self, streams: StreamPool, events: EventPool, record: bool = False) -> None:
        self.streams = streams
        self.events = events
        self.record = record
        self.main = streams.lease()  # clean: the finalizer gives it back
        self._fin = weakref.finalize(self, streams.unlease, self.main)
        self._waiting: list[tuple[torch.Tensor, DummyStream]] = []
        self._callbacks: list[Callable[[], None]] = []

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        ev = self.events.get_event() if self.record else None  # clean: near miss, same condition on return
        dst.copy_(src)
        if self.record:
            self.events.put_event(ev)

    def copy_timed(self, src: torch.Tensor, dst: torch.Tensor) -> object:
        start = self.events.get_event()  # leak: start is dropped, only the end event goes to the caller
        dst.copy_(src)
        end = self.events.get_event()  # clean: returned to the caller
        return end

    def copy_logged(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        ev = self.copy_timed(src, dst)  # clean: put back
        logger.info("copied, event %r", ev)
        self.events.put_event(ev)

    def copy_many(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        last: object | None = None
        for src, dst in pairs:
            last = self.copy_timed(src, dst)  # leak: each turn overwrites the event, only the last is put back
        if last is not None:
            self.events.put_event(last)

    def copy_async(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        s = self.streams.lease()  # clean: kept with the destination, wait() gives it back
        dst.copy_(src, non_blocking=True)
        self._waiting.append((dst, s))

    def wait(self) -> int:
        n = 0
        while self._waiting:
            dst, s = self._waiting.pop()
            s.synchronize()
            self.streams.unlease(s)
            n += dst.numel()
        return n

    def copy_then(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        s = self.streams.lease()  # clean: near miss, the closure gives it back when callbacks run

        def done() -> None:
            s.synchronize()
            self.streams.unlease(s)

        dst.copy_(src)
        self._callbacks.append(done)

    def run_callbacks(self) -> None:
        todo, self._callbacks = self._callbacks, []
        for cb in todo:
            cb()

    def copy_when(self, src: torch.Tensor, dst: torch.Tensor, ready: bool) -> Callable[[], None] | None:
        s = self.streams.lease()  # leak: not ready means the closure with the stream is not handed out

        def done() -> None:
            self.streams.unlease(s)

        if not ready:
            return None
        dst.copy_(src)
        return done

    def fan_out(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        side = [self.streams.lease() for _ in xs]  # leak: only streams of non-empty tensors go back
        outs = [x.clone() for x in xs]
        for x, s in zip(xs, side):
            if x.numel() > 0:
                s.synchronize()
                self.streams.unlease(s)
        return outs

    def fan_in(self, xs: list[torch.Tensor]) -> torch.Tensor:
        side = [self.streams.lease() for _ in xs]  # clean: near miss, the skip concerns synchronize only
        out = torch.stack([x.clone() for x in xs])
        for x, s in zip(xs, side):
            if x.numel() > 0:
                s.synchronize()
            self.streams.unlease(s)
        return out
