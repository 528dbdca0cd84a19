"""Side streams and events for copy/compute overlap."""
from __future__ import annotations

import weakref
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import Callable, Deque, Iterator, List, Optional

import torch


class FakeEvent:
    def __init__(self) -> None:
        self.done = True

    def record(self, stream: "LogicalStream") -> None:
        self.done = stream.idle

    def query(self) -> bool:
        return self.done


class LogicalStream:
    def __init__(self, sid: int) -> None:
        self.sid = sid
        self.idle = True
        self.work: List[Callable[[], None]] = []

    def run(self) -> None:
        for w in self.work:
            w()
        self.work.clear()


class EventPool:
    def __init__(self, n: int) -> None:
        self._events: Deque[FakeEvent] = deque(FakeEvent() for _ in range(n))

    def take_event(self) -> FakeEvent:
        return self._events.popleft() if self._events else FakeEvent()

    def put_event(self, ev: FakeEvent) -> None:
        self._events.append(ev)

    def take_ready(self, tries: int) -> Optional[FakeEvent]:
        for _ in range(tries):
            ev = self._events.popleft()  # clean: near miss, pending events are appended again before the next try
            if ev.query():
                return ev
            self._events.append(ev)
        return None


class StreamPool:
    def __init__(self, n: int) -> None:
        self._idle = [LogicalStream(i) for i in range(n)]

    def rent_stream(self) -> LogicalStream:
        return self._idle.pop()

    def hand_in(self, s: LogicalStream) -> None:
        s.work.clear()
        self._idle.append(s)

    @contextmanager
    def side(self) -> Iterator[LogicalStream]:
        s = self.rent_stream()  # clean: near miss, a body that ends or returns resumes the generator, which hands it in
        yield s
        self.hand_in(s)

    @contextmanager
    def side_stream(self) -> Iterator[LogicalStream]:
        s = self.rent_stream()  # clean: finally hands it in
        try:
            yield s
        finally:
            self.hand_in(s)


class CopyEngine:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.h2d = streams.rent_stream()  # clean: close hands it in
        self.d2h = streams.rent_stream()  # leak: close returns early when there is nothing pending, before d2h is handed in
        self.pending: Deque[FakeEvent] = deque()
        self._stack = ExitStack()

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.h2d.work.append(lambda: dst.copy_(src))
        self.h2d.run()
        ev = self.events.take_event()  # clean: queued as pending, reap or close puts it back
        ev.record(self.h2d)
        self.pending.append(ev)

    def reap(self) -> int:
        n = 0
        while self.pending and self.pending[0].query():
            self.events.put_event(self.pending.popleft())
            n += 1
        return n

    def close(self) -> None:
        self.streams.hand_in(self.h2d)
        if not self.pending:
            return
        while self.pending:
            self.events.put_event(self.pending.popleft())
        self.streams.hand_in(self.d2h)

    def copy_sync(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        ev = self.events.take_event()  # leak: a shape mismatch returns False and loses the event
        if src.shape != dst.shape:
            return False
        dst.copy_(src)
        ev.record(self.d2h)
        self.events.put_event(ev)
        return True

    def fan_out(self, tensors: List[torch.Tensor]) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        with ExitStack() as st:
            for t in tensors:
                s = st.enter_context(self.streams.side_stream())  # clean: near miss, left with the stack
                s.work.append(lambda t=t: outs.append(t.clone()))
                s.run()
        return outs

    def barrier(self, n: int) -> bool:
        evs = [self.events.take_event() for _ in range(n)]  # clean: near miss, all put back before the verdict
        ok = all(e.query() for e in evs)
        for e in evs:
            self.events.put_event(e)
        return ok

    def wait_any(self, tries: int) -> bool:
        ev = self.events.take_ready(tries)  # leak: a ready event is not put back
        return ev is not None

    def wait_one(self, tries: int) -> bool:
        ev = self.events.take_ready(tries)  # clean: put back when there is one
        if ev is None:
            return False
        self.events.put_event(ev)
        return True

    def run_on_side(self, fn: Callable[[], torch.Tensor]) -> torch.Tensor:
        s = self.streams.rent_stream()  # clean: near miss, the local function hands it in and is called on the way out
        result: List[torch.Tensor] = []

        def finish() -> torch.Tensor:
            self.streams.hand_in(s)
            return result[0]

        s.work.append(lambda: result.append(fn()))
        s.run()
        return finish()

    def run_deferred(self, fn: Callable[[], None]) -> None:
        s = self.streams.rent_stream()  # leak: the closure that would hand it in is never called
        s.work.append(fn)
        s.run()

        def finish() -> None:
            self.streams.hand_in(s)

    def attach(self, owner: object) -> LogicalStream:
        s = self.streams.rent_stream()  # clean: near miss, the finalizer hands it in with the owner
        weakref.finalize(owner, self.streams.hand_in, s)
        return s
