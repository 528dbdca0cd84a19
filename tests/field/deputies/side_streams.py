"""Side streams and events for overlapped copies and prefetch."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator

import torch


class StreamPool:
    def __init__(self, n: int, priority: int = 0) -> None:
        self._streams = [torch.cuda.Stream(priority=priority) for _ in range(n)]
        self._free = deque(range(n))
        self._cv = threading.Condition()

    def borrow(self, timeout: float | None = None) -> "Lease | None":
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._free), timeout):
                return None
            return Lease(self, self._free.popleft())

    def hand_back(self, index: int) -> None:
        with self._cv:
            self._free.append(index)
            self._cv.notify()

    def stream(self, index: int) -> torch.cuda.Stream:
        return self._streams[index]


class EventPool:
    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self.outstanding = 0

    def get(self) -> torch.cuda.Event:
        self.outstanding += 1
        return self._free.pop() if self._free else torch.cuda.Event()

    def put(self, ev: torch.cuda.Event) -> None:
        self.outstanding -= 1
        self._free.append(ev)


@dataclass
class Lease:
    pool: StreamPool
    index: int
    closed: bool = False

    @property
    def stream(self) -> torch.cuda.Stream:
        return self.pool.stream(self.index)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.pool.hand_back(self.index)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Copier:
    """Asynchronous host-to-device copies, retired in order."""

    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self.queue: deque[tuple[Lease, torch.cuda.Event, torch.Tensor]] = deque()
        self.fence: torch.cuda.Event | None = None

    def copy_async(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        lease = self.streams.borrow(timeout=0.0)  # clean: near miss, queued with its event, closed by retire()
        if lease is None:
            return False
        ev = self.events.get()  # clean: queued with the lease, put back by retire()
        with torch.cuda.stream(lease.stream):
            dst.copy_(src, non_blocking=True)
            ev.record()
        self.queue.append((lease, ev, dst))
        return True

    def retire(self, block: bool = False) -> int:
        n = 0
        while self.queue:
            lease, ev, _ = self.queue[0]
            if block:
                ev.synchronize()
            elif not ev.query():
                break
            self.queue.popleft()
            self.events.put(ev)
            lease.close()
            n += 1
        return n

    def copy_now(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        with self.streams.borrow() as lease:  # clean: without a timeout it is never None, and the with closes it
            with torch.cuda.stream(lease.stream):
                dst.copy_(src, non_blocking=True)
            lease.stream.synchronize()

    def copy_if_idle(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        lease = self.streams.borrow(timeout=0.0)  # leak: a busy stream returns False and the lease is left open
        if lease is None:
            return False
        if not lease.stream.query():
            return False
        with torch.cuda.stream(lease.stream):
            dst.copy_(src)
        lease.close()
        return True

    def set_fence(self) -> None:
        ev = self.events.get()  # leak: the former fence is replaced without being put back
        ev.record()
        self.fence = ev

    def wait_fence(self) -> None:
        if self.fence is not None:
            self.fence.synchronize()
            self.events.put(self.fence)
            self.fence = None

    def step(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for src, dst in pairs:
            if not self.copy_async(src, dst):  # clean: near miss, a full pool falls to the synchronous way, else retire() ends it
                self.retire(block=True)
                self.copy_now(src, dst)
            self.set_fence()
        self.wait_fence()
        self.retire(block=True)


class Prefetcher:
    """Keeps one batch ahead on its own stream."""

    def __init__(self, loader: Iterable[dict[str, torch.Tensor]], streams: StreamPool, events: EventPool) -> None:
        self.loader = iter(loader)
        self.events = events
        self.lease = streams.borrow()  # clean: near miss, held for the prefetcher's life and closed by close()
        self.aux = streams.borrow(timeout=0.1)  # leak: close() closes lease alone, aux is forgotten
        self.next_batch: dict[str, torch.Tensor] | None = None
        self.ready: torch.cuda.Event | None = None

    def _load(self) -> None:
        batch = next(self.loader, None)
        if batch is None:
            self.next_batch = None
            return
        stream = self.aux.stream if self.aux is not None and len(batch) > 8 else self.lease.stream
        with torch.cuda.stream(stream):
            self.next_batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        if self.ready is None:
            self.ready = self.events.get()  # clean: near miss, got only once, recorded again for each batch, put back by close()
        self.ready.record(stream)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._load()
        while self.next_batch is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            out = self.next_batch
            self._load()
            yield out

    def close(self) -> None:
        if self.ready is not None:
            self.events.put(self.ready)
            self.ready = None
        self.lease.close()


def timed(events: EventPool, fn: Callable[[], torch.Tensor]) -> bool:
    ev = events.get()  # leak: when fn raises an out-of-memory error it answers False and the event is not put back
    try:
        fn()
    except torch.cuda.OutOfMemoryError:
        return False
    ev.record()
    ev.synchronize()
    events.put(ev)
    return True


def run_parallel(pool: StreamPool, fns: list[Callable[[], None]]) -> int:
    leases: list[Lease] = []
    for fn in fns:
        lease = pool.borrow(timeout=0.5)  # clean: near miss, the break keeps those in the list, and all of them are closed below
        if lease is None:
            break
        leases.append(lease)
        with torch.cuda.stream(lease.stream):
            fn()
    for lease in leases:
        lease.stream.synchronize()
        lease.close()
    return len(leases)


def first_idle(pool: StreamPool, tries: int) -> Lease | None:
    for _ in range(tries):
        lease = pool.borrow(timeout=0.01)  # leak: a busy stream is dropped for the next try without being closed
        if lease is None:
            continue
        if lease.stream.query():
            return lease
    return None


def on_idle_stream(pool: StreamPool, fn: Callable[[], None]) -> bool:
    lease = first_idle(pool, 4)  # clean: closed in the with, None refused
    if lease is None:
        return False
    with lease, torch.cuda.stream(lease.stream):
        fn()
    return True
