"""Side streams and events for copies, collectives and activation offload."""
from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple, Type

try:
    import torch
except ImportError:
    torch = None

_ids = itertools.count()


class Stream:
    def __init__(self, priority: int) -> None:
        self.id = next(_ids)
        self.priority = priority
        self.work: List[str] = []

    def enqueue(self, what: str) -> None:
        self.work.append(what)


class Event:
    def __init__(self) -> None:
        self.recorded: Optional[int] = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream.id

    def query(self) -> bool:
        return self.recorded is not None


class StreamPool:
    """Streams per priority, and a free list of events that grows on demand."""

    def __init__(self, per_priority: int = 4) -> None:
        self._lock = threading.RLock()
        self._idle: Dict[int, List[Stream]] = {
            prio: [Stream(prio) for _ in range(per_priority)] for prio in (-1, 0)
        }
        self._busy: Set[int] = set()
        self._events: List[Event] = []

    def acquire_stream(self, priority: int = 0) -> Stream:
        with self._lock:
            stream = self._idle[priority].pop()
            self._busy.add(stream.id)
            return stream

    def release_stream(self, stream: Stream) -> None:
        with self._lock:
            self._busy.discard(stream.id)
            stream.work.clear()
            self._idle[stream.priority].append(stream)

    def get_event(self) -> Event:
        with self._lock:
            return self._events.pop() if self._events else Event()

    def put_event(self, event: Event) -> None:
        event.recorded = None
        with self._lock:
            self._events.append(event)

    @contextmanager
    def stream(self, priority: int = 0) -> Iterator[Stream]:
        stream = self.acquire_stream(priority)  # clean: released in the finally
        try:
            yield stream
        finally:
            self.release_stream(stream)

    @contextmanager
    def timed(self, into: List[Tuple[Event, Event]], stream: Stream) -> Iterator[None]:
        start = self.get_event()  # leak: the pair goes to the list only when the body does not raise, and retry_timed survives that
        start.record(stream)
        yield
        end = self.get_event()  # clean: handed to the list of the caller
        end.record(stream)
        into.append((start, end))


class CopyScope:
    """``with CopyScope(pool) as stream`` gives a stream for copies."""

    def __init__(self, pool: StreamPool, sync: bool = True) -> None:
        self._pool = pool
        self._sync = sync
        self._stream: Optional[Stream] = None

    def __enter__(self) -> Stream:
        self._stream = self._pool.acquire_stream(-1)  # leak: __exit__ returns before the release when the body raised
        return self._stream

    def __exit__(self, exc_type: Optional[Type[BaseException]], exc: Any, tb: Any) -> bool:
        assert self._stream is not None
        if exc_type is not None:
            return issubclass(exc_type, BlockingIOError)
        if self._sync:
            self._stream.enqueue("synchronize")
        self._pool.release_stream(self._stream)
        return False


class CommScope:
    """Stream and event for one collective; reusable, not reentrant."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self._stream: Optional[Stream] = None
        self._event: Optional[Event] = None

    def __enter__(self) -> "CommScope":
        self._stream = self._pool.acquire_stream(0)  # clean: released in __exit__
        self._event = self._pool.get_event()  # clean: near miss, put back in __exit__ before its early return
        return self

    def __exit__(self, exc_type: Optional[Type[BaseException]], exc: Any, tb: Any) -> bool:
        stream, self._stream = self._stream, None
        event, self._event = self._event, None
        if event is not None:
            self._pool.put_event(event)
        if stream is None:
            return False
        if exc_type is BlockingIOError:
            self._pool.release_stream(stream)
            return True
        stream.enqueue("wait")
        self._pool.release_stream(stream)
        return False

    def launch(self, what: str) -> None:
        assert self._stream is not None and self._event is not None
        self._stream.enqueue(what)
        self._event.record(self._stream)


def copy_all(pool: StreamPool, names: List[str]) -> None:
    with CopyScope(pool) as stream:
        for name in names:
            stream.enqueue(f"copy {name}")


def all_reduce(pool: StreamPool, name: str) -> None:
    with CommScope(pool) as scope:
        scope.launch(name)


class TransferEngine:
    """Runs host to device copies and recycles events as they complete."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self._stream = pool.acquire_stream(-1)  # clean: held by the engine for its life, close() releases it
        self._pending: List[Tuple[Event, Callable[[], None]]] = []
        self._fences: Dict[str, Event] = {}

    def submit(self, name: str, on_done: Callable[[], None]) -> None:
        event = self._pool.get_event()  # clean: near miss, leaves the pending list in poll(), which puts it back
        self._stream.enqueue(name)
        event.record(self._stream)
        self._pending.append((event, on_done))

    def poll(self) -> int:
        still: List[Tuple[Event, Callable[[], None]]] = []
        done = 0
        for event, on_done in self._pending:
            if not event.query():
                still.append((event, on_done))
                continue
            self._pool.put_event(event)
            on_done()
            done += 1
        self._pending = still
        return done

    def fence(self, name: str) -> None:
        event = self._pool.get_event()  # leak: submit_all sets the same fence for each name and each entry overwrites the one before
        event.record(self._stream)
        self._fences[name] = event

    def submit_all(self, names: List[str], on_done: Callable[[], None]) -> bool:
        for name in names:
            self.submit(name, on_done)
            self.fence("h2d")
        return self.wait_fence("h2d")

    def wait_fence(self, name: str) -> bool:
        event = self._fences.pop(name, None)
        if event is None:
            return False
        ready = event.query()
        self._pool.put_event(event)
        return ready

    def close(self) -> None:
        for event, _ in self._pending:
            self._pool.put_event(event)
        for event in self._fences.values():
            self._pool.put_event(event)
        self._pending = []
        self._fences = {}
        self._pool.release_stream(self._stream)


def retry_timed(pool: StreamPool, fn: Callable[[Stream], None], attempts: int) -> List[Tuple[Event, Event]]:
    marks: List[Tuple[Event, Event]] = []
    with pool.stream() as stream:  # clean: context manager releases
        for _ in range(attempts):
            try:
                with pool.timed(marks, stream):  # clean: the with statement ends the context
                    fn(stream)
                break
            except TimeoutError:
                continue
    return marks


def measure(pool: StreamPool, fn: Callable[[Stream], None]) -> int:
    marks = retry_timed(pool, fn, 3)  # clean: every pair of the list is put back
    for start, end in marks:
        pool.put_event(start)
        pool.put_event(end)
    return len(marks)


def barrier(pool: StreamPool, streams: List[Stream]) -> bool:
    """True when each stream had work before the barrier."""
    events = []
    for stream in streams:
        event = pool.get_event()  # leak: the early return drops the events of the streams before
        event.record(stream)
        events.append(event)
        if not stream.work:
            pool.put_event(event)
            return False
    for event in events:
        pool.put_event(event)
    return True


def side_stream(pool: StreamPool, current: Optional[Stream]) -> Tuple[Stream, bool]:
    """The stream to run on, and whether the caller has to release it."""
    if current is not None:
        return current, False
    return pool.acquire_stream(), True  # clean: returned, the flag says that it is the caller's


def offload(pool: StreamPool, name: str, current: Optional[Stream] = None) -> None:
    stream, owned = side_stream(pool, current)  # clean: near miss, released under the flag that came with it
    stream.enqueue(f"offload {name}")
    if owned:
        pool.release_stream(stream)


def reload(pool: StreamPool, name: str, current: Optional[Stream] = None, wait: bool = True) -> None:
    stream, owned = side_stream(pool, current)  # leak: an owned stream is only released when wait is set
    stream.enqueue(f"reload {name}")
    if wait and owned:
        stream.enqueue("synchronize")
        pool.release_stream(stream)
