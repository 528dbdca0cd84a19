"""Scopes for side streams and timing events in the overlap engine."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional


class SideStream:
    def __init__(self, ident: int, priority: int):
        self.ident = ident
        self.priority = priority
        self.work: List[str] = []

    def launch(self, name: str) -> None:
        self.work.append(name)


class TimingEvent:
    def __init__(self):
        self.at: Optional[int] = None

    def record(self, s: SideStream) -> None:
        self.at = len(s.work)


class StreamBroker:
    def __init__(self, n: int = 8):
        self._streams = [SideStream(i, 0) for i in range(n)]
        self._events = [TimingEvent() for _ in range(2 * n)]

    def lend_stream(self, priority: int = 0) -> SideStream:
        s = self._streams.pop()
        s.priority = priority
        s.work.clear()
        return s

    def reclaim_stream(self, s: SideStream) -> None:
        self._streams.append(s)

    def lend_event(self) -> Optional[TimingEvent]:
        return self._events.pop() if self._events else None

    def reclaim_event(self, ev: TimingEvent) -> None:
        ev.at = None
        self._events.append(ev)

    def counts(self) -> Dict[str, int]:
        return {"streams": len(self._streams), "events": len(self._events)}


class StreamScope:
    """with StreamScope(broker) as s: ..."""

    def __init__(self, broker: StreamBroker, priority: int = 0):
        self.broker = broker
        self.priority = priority
        self.stream: Optional[SideStream] = None

    def __enter__(self) -> SideStream:
        self.stream = self.broker.lend_stream(self.priority)  # clean: reclaimed in __exit__ on every way
        return self.stream

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        stream, self.stream = self.stream, None
        self.broker.reclaim_stream(stream)
        return exc_type is KeyboardInterrupt


class TimedScope:
    def __init__(self, broker: StreamBroker, sink: Dict[str, int], name: str):
        self.broker = broker
        self.sink = sink
        self.name = name

    def __enter__(self) -> SideStream:
        self.start = self.broker.lend_event()  # leak: __exit__ returns early when nothing was launched
        self.stream = self.broker.lend_stream()  # clean: near miss, reclaimed first thing in __exit__
        if self.start is not None:
            self.start.record(self.stream)
        return self.stream

    def __exit__(self, *exc: Any) -> None:
        launched = len(self.stream.work)
        self.broker.reclaim_stream(self.stream)
        if launched == 0:
            return
        self.sink[self.name] = launched
        if self.start is not None:
            self.broker.reclaim_event(self.start)


@contextlib.contextmanager
def stream(broker: StreamBroker) -> Iterator[SideStream]:
    s = broker.lend_stream()  # clean: finally
    try:
        yield s
    finally:
        broker.reclaim_stream(s)


@contextlib.contextmanager
def quiet_stream(broker: StreamBroker, log: List[str]) -> Iterator[SideStream]:
    """Errors of the body are logged and swallowed."""
    s = broker.lend_stream()  # leak: RuntimeError of the body is swallowed past the reclaim
    try:
        yield s
        broker.reclaim_stream(s)
    except RuntimeError as exc:
        log.append(str(exc))


@contextlib.contextmanager
def event_pair(broker: StreamBroker) -> Iterator[Optional[tuple]]:
    a = broker.lend_event()  # leak: not reclaimed when there is no second event
    if a is None:
        yield None
        return
    b = broker.lend_event()  # clean: None-checked, reclaimed in finally
    if b is None:
        yield None
        return
    try:
        yield a, b
    finally:
        broker.reclaim_event(a)
        broker.reclaim_event(b)


class OverlapEngine:
    def __init__(self, broker: StreamBroker):
        self.broker = broker

    def run(self, names: List[str]) -> int:
        n = 0
        with StreamScope(self.broker, 1) as s:  # clean: with
            for name in names:
                if not name:
                    continue
                s.launch(name)
                n += 1
        return n

    def run_callbacks(self, names: List[str]) -> int:
        with contextlib.ExitStack() as stack:
            total = 0
            for name in names:
                s = self.broker.lend_stream()  # clean: near miss, bound again but each has its callback on the stack
                stack.callback(self.broker.reclaim_stream, s)
                s.launch(name)
                total += len(s.work)
            return total

    def run_detached(self, names: List[str]) -> contextlib.ExitStack:
        """The caller closes the stack when the work has finished."""
        with contextlib.ExitStack() as stack:
            for name in names:
                s = self.broker.lend_stream()  # clean: near miss, pop_all hands its callback to the caller
                stack.callback(self.broker.reclaim_stream, s)
                s.launch(name)
            return stack.pop_all()

    def warmup(self, names: List[str]) -> None:
        held = self.run_detached(names)  # clean: closed below
        held.close()

    def preload(self, names: List[str]) -> int:
        self.run_detached(names)  # leak: the returned stack is dropped unclosed
        return len(names)

    def measure(self, name: str) -> int:
        with event_pair(self.broker) as pair:  # clean: with, the fault is inside the manager
            if pair is None:
                return -1
            with stream(self.broker) as s:  # clean: with
                pair[0].record(s)
                s.launch(name)
                pair[1].record(s)
            return pair[1].at - pair[0].at
