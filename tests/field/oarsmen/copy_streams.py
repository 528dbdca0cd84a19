"""Side streams and timing events for a data-parallel input pipeline.

Creating CUDA events in the hot loop is slow and a process should not have more than a handful of streams.
"""
from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
import typing

import torch

logger = logging.getLogger(__name__)
T = typing.TypeVar("T")


class OutOfStreams(RuntimeError): ...
class StaleLease(RuntimeError): ...

class SkipBatch(Exception):
    """Raised by a collate function for a batch that should not be trained on."""


class EventPool:
    def __init__(self, cap: int = 512, timing: bool = False) -> None:
        self.cap, self.timing, self.made = cap, timing, 0
        self._spare: list[torch.cuda.Event] = []
        self._mutex = threading.Lock()

    def lend(self) -> torch.cuda.Event:
        with self._mutex:
            if self._spare:
                return self._spare.pop()  # clean: returned
            if self.made >= self.cap:
                raise OutOfStreams(f"{self.cap} events are in flight")
            self.made += 1
        return torch.cuda.Event(enable_timing=self.timing)

    def retire(self, *events: torch.cuda.Event) -> None:
        with self._mutex:
            self._spare.extend(events)

    @contextlib.contextmanager
    def pair(self) -> typing.Iterator[tuple[torch.cuda.Event, torch.cuda.Event]]:
        start = self.lend()  # leak: the second lend() may raise OutOfStreams outside of the try
        stop = self.lend()  # clean: retired in the finally
        try:
            yield start, stop
        finally:
            self.retire(start, stop)


class StreamLease:
    """A stream on loan. A lease that was recalled raises on use, the stream then goes back by way of recall()."""

    def __init__(self, desk: "StreamDesk", index: int, owner: str) -> None:
        self.desk, self.index, self.owner = desk, index, owner
        self.valid = True

    @property
    def stream(self) -> torch.cuda.Stream:
        if not self.valid:
            raise StaleLease(self.owner)
        return self.desk.streams[self.index]

    def end(self) -> None:
        if self.valid:
            self.valid = False
            self.desk._return(self.index)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.end()


class StreamDesk:
    def __init__(self, count: int, device: int) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(count)]
        self._idle = collections.deque(range(count))
        self._open: dict[str, StreamLease] = {}
        self._mutex = threading.RLock()

    def lease(self, owner: str) -> StreamLease:
        with self._mutex:
            if not self._idle:
                raise OutOfStreams(owner)
            idx = self._idle.popleft()  # clean: in the lease, which end() or recall() sends back
            return StreamLease(self, idx, owner)

    def lease_named(self, owner: str) -> StreamLease:
        """One lease per owner; asking again gives the same one."""
        with self._mutex:
            known = self._open.get(owner)
            if known is not None and known.valid:
                return known
            lease = self.lease(owner)  # clean: in the table and ended by recall() or recall_all()
            self._open[owner] = lease
            return lease

    def _return(self, index: int) -> None:
        with self._mutex:
            self._idle.append(index)

    def recall(self, owner: str) -> bool:
        with self._mutex:
            lease = self._open.pop(owner, None)
        if lease is not None:
            lease.end()
        return lease is not None

    def recall_all(self) -> None:
        for owner in list(self._open):
            self.recall(owner)

    def quietest(self, among: int = 2) -> typing.Optional[StreamLease]:
        """The first of a few idle streams that has no work queued."""
        tried: list[int] = []
        chosen = None
        with self._mutex:
            while self._idle and len(tried) < among:
                idx = self._idle.popleft()  # leak: of the busy ones only the last that was tried goes back to the idle streams
                if self.streams[idx].query():
                    chosen = StreamLease(self, idx, "quietest")
                    break
                tried.append(idx)
            if tried:
                self._idle.append(tried[-1])
        return chosen


def to_device(batch: typing.Any, device: int, stream: torch.cuda.Stream) -> typing.Any:
    if isinstance(batch, torch.Tensor):
        with torch.cuda.stream(stream):
            return batch.to(device, non_blocking=True)
    return batch


def prefetched(source: typing.Iterable[T], desk: StreamDesk, events: EventPool, device: int, depth: int = 2) -> typing.Iterator[T]:
    """Copies `depth` batches ahead on a side stream."""
    window: collections.deque = collections.deque()
    with desk.lease("prefetch") as lease:  # clean: with
        side = lease.stream
        try:
            for batch in source:
                ev = events.lend()  # clean: near miss, in the window, retired when its batch is due or with the rest in the finally
                window.append((ev, to_device(batch, device, side)))
                ev.record(side)
                if len(window) > depth:
                    done, ready = window.popleft()
                    torch.cuda.current_stream(device).wait_event(done)
                    events.retire(done)
                    yield ready
            for done, ready in list(window):
                done.synchronize()
                yield ready
        finally:
            events.retire(*(ev for ev, _ in window))


def collated(source: typing.Iterable[list], collate: typing.Callable[[list], T], events: EventPool, stream: torch.cuda.Stream) -> typing.Iterator[tuple[T, torch.cuda.Event]]:
    """Batches with the event that says that they are complete; the consumer retires the event."""
    for samples in source:
        mark = events.lend()  # leak: a SkipBatch from collate goes on with the next samples and a new event
        try:
            batch = collate(samples)
        except SkipBatch as exc:
            logger.debug("skipped: %s", exc)
            continue
        mark.record(stream)
        yield batch, mark


def train_epoch(batches: typing.Iterable[tuple[T, torch.cuda.Event]], events: EventPool, step: typing.Callable[[T], float], patience: float) -> float:
    total = 0.0
    for batch, mark in batches:  # leak: a loss beyond the patience breaks out of the loop with the event of that batch
        torch.cuda.current_stream().wait_event(mark)
        loss = step(batch)
        if loss > patience:
            logger.error("loss %.3f, epoch stopped", loss)
            break
        events.retire(mark)
        total += loss
    return total


def evaluate(batches: typing.Iterable[tuple[T, torch.cuda.Event]], events: EventPool, score: typing.Callable[[T], float]) -> list[float]:
    out: list[float] = []
    for batch, mark in batches:  # clean: near miss, retired at the head of the body, before anything can continue or break
        mark.synchronize()
        events.retire(mark)
        value = score(batch)
        if math.isnan(value):
            continue
        out.append(value)
        if len(out) >= 1000:
            break
    return out


class Overlap:
    """Runs the gradient exchange of bucket i while bucket i + 1 is still being computed."""

    def __init__(self, desk: StreamDesk, events: EventPool, reduce: typing.Callable[[torch.Tensor], None]) -> None:
        self.desk, self.events, self.reduce = desk, events, reduce
        self.comm = desk.lease_named("comm")  # clean: ended by close() by way of recall()
        self.aux: typing.Optional[StreamLease] = None
        self.pending: list[torch.cuda.Event] = []

    def bucket(self, grad: torch.Tensor) -> None:
        ready = self.events.lend()  # clean: waits in the list of pending events for drain()
        self.pending.append(ready)
        ready.record()
        self.comm.stream.wait_event(ready)
        with torch.cuda.stream(self.comm.stream):
            self.reduce(grad)

    def sparse_bucket(self, grad: torch.Tensor) -> None:
        if self.aux is None:
            self.aux = self.desk.lease("sparse")  # leak: close() recalls the named lease and drains the events, the unnamed one is forgotten
        self.aux.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aux.stream):
            self.reduce(grad.coalesce())

    def drain(self) -> None:
        if self.comm.valid:
            torch.cuda.current_stream().wait_stream(self.comm.stream)
        self.events.retire(*self.pending)
        self.pending.clear()

    def close(self) -> None:
        self.drain()
        self.desk.recall("comm")


def timed(events: EventPool, fn: typing.Callable[[], T]) -> tuple[T, float]:
    with events.pair() as (start, stop):  # clean: with
        start.record()
        out = fn()
        stop.record()
        stop.synchronize()
        return out, start.elapsed_time(stop)


def fan_out(desk: StreamDesk, jobs: typing.Sequence[typing.Callable[[], None]]) -> None:
    """Runs each job on a stream of its own, as far as there are streams; the others run inline."""
    with contextlib.ExitStack() as stack:
        for i, job in enumerate(jobs):
            try:
                lease = stack.enter_context(desk.lease(f"job-{i}"))  # clean: ended by the exit stack
            except OutOfStreams:
                job()
                continue
            with torch.cuda.stream(lease.stream):
                job()
