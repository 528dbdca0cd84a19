"""Side streams and events for overlapping copies with compute."""
from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import Any, Callable, Iterator, Optional, Protocol, Sequence

import torch

logger = logging.getLogger("overlap")


class Stream(Protocol):
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class StreamPool:
    """Bounded set of side streams by priority."""

    def __init__(self, per_priority: int = 4) -> None:
        self._cap = per_priority
        self._idle: dict[int, list[Stream]] = {}
        self._built: Counter[int] = Counter()

    def checkout(self, priority: int = 0) -> Optional[Stream]:
        idle = self._idle.setdefault(priority, [])
        if idle:
            return idle.pop()
        if self._built[priority] == self._cap:
            return None
        self._built[priority] += 1
        return torch.cuda.Stream(priority=priority)

    def checkin(self, stream: Stream, priority: int = 0) -> None:
        self._idle[priority].append(stream)


class EventPool:
    def __init__(self) -> None:
        self._spare: list[Any] = []
        self.in_use = 0

    def get_event(self) -> Any:
        self.in_use += 1
        return self._spare.pop() if self._spare else torch.cuda.Event()

    def put_event(self, event: Any) -> None:
        self.in_use -= 1
        self._spare.append(event)


class side_stream:
    """``with side_stream(pool) as s`` runs on a side stream, or on the current one when none is left."""

    def __init__(self, pool: StreamPool, priority: int = 0) -> None:
        self._pool = pool
        self._priority = priority
        self._stream: Optional[Stream] = None

    def __enter__(self) -> Stream:
        self._stream = self._pool.checkout(self._priority)  # clean: near miss, checked in by __exit__
        return self._stream or torch.cuda.current_stream()

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._stream is None:
            return False
        self._stream.synchronize()
        self._pool.checkin(self._stream, self._priority)
        self._stream = None
        return False


class deferred_stream:
    """Leaves the stream running when the block ends; it is synchronised only if work is pending."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self._stream: Optional[Stream] = None

    def __enter__(self) -> Optional[Stream]:
        self._stream = self._pool.checkout()  # leak: __exit__ returns early when the stream is idle already
        return self._stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._stream is None:
            return False
        if self._stream.query():
            return False
        self._stream.synchronize()
        self._pool.checkin(self._stream)
        return False


@contextlib.contextmanager
def timed_event(events: EventPool, sink: Callable[[float], None]) -> Iterator[Any]:
    start = events.get_event()  # clean: put back after the block
    stop = events.get_event()  # leak: only start is put back
    start.record()
    yield start
    stop.record()
    stop.synchronize()
    sink(start.elapsed_time(stop))
    events.put_event(start)


@contextlib.contextmanager
def fork_join(pool: StreamPool, events: EventPool, n: int) -> Iterator[list[Stream]]:
    """Up to n side streams which start after, and end before, the current stream's next work."""
    ready = events.get_event()  # clean: put back by the finally
    ready.record()
    streams: list[Stream] = []
    try:
        for _ in range(n):
            s = pool.checkout()  # clean: near miss, the list is checked in by the finally
            if s is None:
                break
            s.wait_event(ready)
            streams.append(s)
        yield streams
    finally:
        for s in streams:
            s.synchronize()
            pool.checkin(s)
        events.put_event(ready)


def run_heads(
    pool: StreamPool, events: EventPool, fns: Sequence[Callable[[], torch.Tensor]]
) -> list[torch.Tensor]:
    with fork_join(pool, events, len(fns)) as streams:  # clean: with block
        if not streams:
            return [fn() for fn in fns]
        out = []
        for i, fn in enumerate(fns):
            with torch.cuda.stream(streams[i % len(streams)]):
                out.append(fn())
        return out


def overlap(pool: StreamPool, main: Callable[[], torch.Tensor], side: Callable[[], None]) -> torch.Tensor:
    stream = pool.checkout(priority=-1)  # leak: checked in only when the main result is finite
    if stream is None:
        side()
        return main()
    with torch.cuda.stream(stream):
        side()
    out = main()
    if not bool(torch.isfinite(out).all()):
        logger.warning("non-finite output, side work discarded")
        return torch.zeros_like(out)
    stream.synchronize()
    pool.checkin(stream, priority=-1)
    return out


def pick_stream(pool: StreamPool) -> Optional[Stream]:
    """A high-priority stream if there is one, else any."""
    return pool.checkout(-1) or pool.checkout(0)  # clean: near miss, one of the two is handed to the caller


def broadcast_copies(pool: StreamPool, t: torch.Tensor, devices: Sequence[str]) -> dict[str, torch.Tensor]:
    copies: dict[str, torch.Tensor] = {}
    held: list[Stream] = []
    for dev in devices:
        s = pool.checkout()  # clean: near miss, held is popped empty below
        if s is None:
            copies[dev] = t.to(dev)
            continue
        held.append(s)
        with torch.cuda.stream(s):
            copies[dev] = t.to(dev, non_blocking=True)
    while held:
        s = held.pop()
        s.synchronize()
        pool.checkin(s)
    return copies


def gather_copies(pool: StreamPool, shards: dict[str, torch.Tensor]) -> torch.Tensor:
    held: dict[str, Stream] = {}
    out: list[torch.Tensor] = []
    for name, shard in shards.items():
        s = pool.checkout()  # leak: shards of one device share a key, the earlier stream is overwritten
        if s is None:
            out.append(shard.cpu())
            continue
        held[name.split("/")[0]] = s
        with torch.cuda.stream(s):
            out.append(shard.to("cpu", non_blocking=True))
    for s in held.values():
        s.synchronize()
        pool.checkin(s)
    return torch.cat(out)


class Pipeline:
    """Stages linked by events; each stage waits for the one before."""

    def __init__(self, pool: StreamPool, events: EventPool) -> None:
        self._pool = pool
        self._events = events
        self._last: Optional[Any] = None

    def stage(self, fn: Callable[[], None]) -> bool:
        stream = self._pool.checkout()  # clean: checked in once the stage has recorded its event
        if stream is None:
            return False
        if self._last is not None:
            stream.wait_event(self._last)
            self._events.put_event(self._last)
        with torch.cuda.stream(stream):
            fn()
        self._last = self._events.get_event()  # clean: near miss, the next stage or finish() puts it back
        stream.record_event(self._last)
        self._pool.checkin(stream)
        return True

    def finish(self) -> None:
        if self._last is not None:
            self._last.synchronize()
            self._events.put_event(self._last)
            self._last = None


def fence(events: EventPool, streams: Sequence[Stream]) -> None:
    """Make every stream wait for all the others."""
    marks = []
    for s in streams:
        mark = events.get_event()  # clean: near miss, collected in marks, all put back at the end
        s.record_event(mark)
        marks.append(mark)
    for s in streams:
        for mark in marks:
            s.wait_event(mark)
    for mark in marks:
        events.put_event(mark)


def chain(events: EventPool, streams: Sequence[Stream]) -> None:
    """Each stream waits for its predecessor only."""
    mark = None
    for s in streams:
        if mark is not None:
            s.wait_event(mark)
        mark = events.get_event()  # leak: each turn's event but the last is overwritten
        s.record_event(mark)
    if mark is not None:
        events.put_event(mark)
