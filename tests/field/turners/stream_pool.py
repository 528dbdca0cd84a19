"""CUDA stream and event pools with guards for copy/compute overlap."""
from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

try:
    import torch
    HAS_CUDA = torch.cuda.is_available()
except ImportError:
    torch = None
    HAS_CUDA = False

logger = logging.getLogger(__name__)


class FakeStream:
    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        pass


class FakeEvent:
    def __init__(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done


class StreamPool:
    def __init__(self, count: int) -> None:
        self._mutex = threading.Lock()
        self._streams: List[FakeStream] = [FakeStream() for _ in range(count)]

    def lease(self) -> Optional[FakeStream]:
        with self._mutex:
            return self._streams.pop() if self._streams else None

    def unlease(self, stream: FakeStream) -> None:
        with self._mutex:
            self._streams.append(stream)


class EventPool:
    def __init__(self) -> None:
        self._events: List[FakeEvent] = []
        self.live = 0

    def fetch(self) -> FakeEvent:
        self.live += 1
        return self._events.pop() if self._events else FakeEvent()

    def recycle(self, event: FakeEvent) -> None:
        self.live -= 1
        self._events.append(event)


class StreamGuard:
    """Runs the body on a leased stream, or on the current one when none is free."""

    def __init__(self, pool: StreamPool, sync: bool = True) -> None:
        self.pool = pool
        self.sync = sync
        self.stream: Optional[FakeStream] = None

    def __enter__(self) -> Optional[FakeStream]:
        self.stream = self.pool.lease()  # leak: __exit__ returns early when sync is off
        return self.stream

    def __exit__(self, *exc: Any) -> None:
        if self.stream is None:
            return
        if not self.sync:
            return
        self.stream.synchronize()
        self.pool.unlease(self.stream)
        self.stream = None


class SideStream:
    def __init__(self, pool: StreamPool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.stream: Optional[FakeStream] = None

    def __enter__(self) -> "SideStream":
        if self.enabled:
            self.stream = self.pool.lease()  # clean: near miss, __exit__ returns early only without a stream
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.stream is None:
            return False
        stream, self.stream = self.stream, None
        self.pool.unlease(stream)
        if exc_type is not None:
            logger.error("side stream failed: %s", exc)
        return False


class CopyEngine:
    def __init__(self, streams: StreamPool, events: EventPool, use_side_stream: bool = True) -> None:
        self.streams = streams
        self.events = events
        self.use_side_stream = use_side_stream
        self.copy_stream: Optional[FakeStream] = None
        self.fences: Dict[str, FakeEvent] = {}
        self.marks: Dict[str, FakeEvent] = {}
        self.pending: List[Tuple[FakeEvent, Callable[[], None]]] = []

    def start(self) -> None:
        if self.use_side_stream and self.copy_stream is None:
            self.copy_stream = self.streams.lease()  # clean: near miss, stop unleases under the field itself

    def stop(self) -> None:
        if self.copy_stream is not None:
            self.streams.unlease(self.copy_stream)
            self.copy_stream = None
        for table in (self.fences, self.marks):
            for event in table.values():
                self.events.recycle(event)
            table.clear()

    def mark(self, layer: str) -> None:
        event = self.events.fetch()  # leak: a layer marked twice before settle overwrites its event
        self.marks[layer] = event

    def settle(self, layer: str) -> None:
        event = self.marks.pop(layer, None)
        if event is not None:
            self.events.recycle(event)

    def fence_once(self, layer: str) -> None:
        event = self.fences.pop(layer, None)
        if event is not None:
            self.events.recycle(event)
        self.fences[layer] = self.events.fetch()  # clean: near miss, the older event is recycled first

    def wait(self, layer: str) -> bool:
        event = self.fences.pop(layer, None)
        if event is None:
            return False
        done = event.query()
        self.events.recycle(event)
        return done

    def submit(self, job: Callable[[], None]) -> None:
        event = self.events.fetch()  # clean: goes to pending, poll recycles it
        self.pending.append((event, job))

    def poll(self) -> int:
        finished = 0
        still: List[Tuple[FakeEvent, Callable[[], None]]] = []
        for event, job in self.pending:
            if not event.query():
                still.append((event, job))
                continue
            job()
            self.events.recycle(event)
            finished += 1
        self.pending = still
        return finished

    def copy(self, src: bytearray, dst: bytearray, blocking: bool) -> Optional[FakeEvent]:
        """Returns the completion event of a non-blocking copy; hand it to finish_copy."""
        event = self.events.fetch()  # clean: near miss, recycled when blocking, returned otherwise
        dst[: len(src)] = src
        if blocking:
            self.events.recycle(event)
            return None
        return event

    def finish_copy(self, event: Optional[FakeEvent]) -> None:
        if event is not None:
            self.events.recycle(event)

    def copy_all(self, pairs: Sequence[Tuple[bytearray, bytearray]]) -> None:
        last: Optional[FakeEvent] = None
        for src, dst in pairs:
            last = self.copy(src, dst, blocking=False)  # leak: rebinding keeps the last event only
        self.finish_copy(last)

    def copy_each(self, pairs: Sequence[Tuple[bytearray, bytearray]]) -> None:
        events = [self.copy(s, d, blocking=False) for s, d in pairs]  # clean: the list is finished one by one
        for event in events:
            self.finish_copy(event)

    def timed(self, fn: Callable[[], None]) -> bool:
        begin = self.events.fetch()  # clean: recycled on both ways
        end = self.events.fetch()  # leak: the branch for an unfinished event recycles begin alone
        fn()
        if not end.query():
            self.events.recycle(begin)
            return False
        self.events.recycle(begin)
        self.events.recycle(end)
        return True

    def prefetch(self, layers: Sequence[str]) -> int:
        stream = self.streams.lease() if self.use_side_stream else None  # clean: near miss, None-guarded unlease in finally
        count = 0
        try:
            for layer in layers:
                if layer in self.fences:
                    continue
                self.fence_once(layer)
                count += 1
        finally:
            if stream is not None:
                self.streams.unlease(stream)
        return count

    def drain_to(self, sinks: Sequence[Callable[[FakeStream], bool]]) -> int:
        for i, sink in enumerate(sinks):
            stream = self.streams.lease()  # leak: the sink that accepts breaks out before unlease
            if stream is None:
                return -1
            if sink(stream):
                break
            self.streams.unlease(stream)
        else:
            return -1
        return i


def run_overlapped(engine: CopyEngine, work: Sequence[Callable[[], None]]) -> None:
    with StreamGuard(engine.streams, sync=False):  # clean: the with statement owns it, the fault is in __exit__
        for fn in work:
            fn()


def run_side(engine: CopyEngine, work: Sequence[Callable[[], None]], on: bool) -> None:
    with SideStream(engine.streams, enabled=on):  # clean: with
        for fn in work:
            fn()


if __name__ == "__main__":
    eng = CopyEngine(StreamPool(2), EventPool())
    eng.start()
    eng.prefetch(["l0", "l1"])
    eng.wait("l0")
    eng.submit(lambda: None)
    assert eng.poll() == 1
    eng.copy_each([(bytearray(b"ab"), bytearray(4))])
    run_side(eng, [lambda: None], True)
    eng.stop()
    assert len(eng.streams._streams) == 2 and eng.events.live == 0
