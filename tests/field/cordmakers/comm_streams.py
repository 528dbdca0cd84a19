"""Communicators and side streams for overlapping collectives.

NCCL communicators are expensive, so they are cached by rank set and counted.
Streams and events come from small per-device pools.
"""
from __future__ import annotations

import contextlib
import logging
import threading
from typing import Iterable, Iterator, Optional, Sequence

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

RankSet = tuple[int, ...]


class CommEntry:
    def __init__(self, ranks: RankSet):
        self.ranks = ranks
        self.group = dist.new_group(list(ranks))
        self.refs = 0


class CommCache:
    """Reference-counted communicators."""

    def __init__(self, max_live: int = 16):
        self._entries: dict[RankSet, CommEntry] = {}
        self._lock = threading.Lock()
        self.max_live = max_live

    def incref(self, ranks: Iterable[int]) -> CommEntry:
        key = tuple(sorted(ranks))
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = CommEntry(key)
            entry.refs += 1
            return entry

    def decref(self, entry: CommEntry) -> None:
        with self._lock:
            entry.refs -= 1
            if entry.refs == 0 and len(self._entries) > self.max_live:
                del self._entries[entry.ranks]
                dist.destroy_process_group(entry.group)

    @contextlib.contextmanager
    def using(self, ranks: Iterable[int]) -> Iterator[CommEntry]:
        entry = self.incref(ranks)  # clean: decref in the finally of the context manager
        try:
            yield entry
        finally:
            self.decref(entry)


class StreamPool:
    def __init__(self, device: int, count: int):
        self.device = device
        self._idle = [torch.cuda.Stream(device) for _ in range(count)]
        self._mutex = threading.Lock()

    def checkout(self) -> Optional[torch.cuda.Stream]:
        self._mutex.acquire()  # leak: returns with the lock held when the pool is empty
        if not self._idle:
            return None
        stream = self._idle.pop()  # clean: returned to the caller
        self._mutex.release()
        return stream

    def checkin(self, stream: torch.cuda.Stream) -> None:
        with self._mutex:
            self._idle.append(stream)


class EventPool:
    def __init__(self):
        self._events: list[torch.cuda.Event] = []

    def obtain(self) -> torch.cuda.Event:
        return self._events.pop() if self._events else torch.cuda.Event()  # clean: returned to the caller

    def discard(self, event: torch.cuda.Event) -> None:
        self._events.append(event)


class Overlapped:
    """One collective in flight: stream, event and communicator go back in wait()."""

    def __init__(self, rt: "CommRuntime", entry: CommEntry, stream, event):
        self.rt = rt
        self.entry = entry
        self.stream = stream
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
        self.rt.events.discard(self.event)
        self.rt.streams.checkin(self.stream)
        self.rt.comms.decref(self.entry)


class CommRuntime:
    def __init__(self, device: int, streams: int = 4):
        self.comms = CommCache()
        self.streams = StreamPool(device, streams)
        self.events = EventPool()
        self.inflight: list[Overlapped] = []
        self.default: Optional[CommEntry] = None

    def set_default(self, ranks: Sequence[int]) -> None:
        if self.default is not None:
            self.comms.decref(self.default)
        self.default = self.comms.incref(ranks)  # clean: near miss, the old one is released first, close() the last

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> Optional[Overlapped]:
        entry = self.comms.incref(ranks)  # leak: no decref when no stream is idle
        stream = self.streams.checkout()  # clean: near miss, moved into Overlapped, which wait() unwinds
        if stream is None:
            dist.all_gather_into_tensor(out, x, group=entry.group)
            return None
        event = self.events.obtain()  # clean: moved into Overlapped, discarded by wait()
        with torch.cuda.stream(stream):
            dist.all_gather_into_tensor(out, x, group=entry.group)
            event.record(stream)
        op = Overlapped(self, entry, stream, event)
        self.inflight.append(op)
        return op

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        with self.comms.using(ranks) as entry:  # clean: given back at the end of the with statement
            stream = self.streams.checkout()  # clean: near miss, given back in the branch with the same guard
            ctx = torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
            with ctx:
                dist.reduce_scatter_tensor(out, x, group=entry.group)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
                self.streams.checkin(stream)

    def barrier_all(self, rank_sets: Iterable[Sequence[int]], me: int) -> int:
        count = 0
        for ranks in rank_sets:
            entry = self.comms.incref(ranks)  # leak: the continue for foreign rank sets skips decref()
            if me not in entry.ranks:
                continue
            dist.barrier(group=entry.group)
            count += 1
            self.comms.decref(entry)
        return count

    def drain(self) -> None:
        pending, self.inflight = self.inflight, []
        for op in pending:
            op.wait()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self.events.obtain()  # clean: recorded and returned to the caller
        event.record(stream)
        return event

    def chain(self, streams: Sequence[torch.cuda.Stream]) -> None:
        event = None
        for stream in streams:
            if event is not None:
                stream.wait_event(event)
            event = self.mark(stream)  # leak: each turn rebinds event, only the last one is discarded
        if event is not None:
            self.events.discard(event)

    def try_overlap(self, x: torch.Tensor, ranks: Sequence[int]) -> bool:
        stream = self.streams.checkout()  # leak: not checked in when the tensor is not contiguous
        if stream is None:
            return False
        if not x.is_contiguous():
            log.debug("fall back for strided input")
            return False
        with self.comms.using(ranks) as entry, torch.cuda.stream(stream):  # clean: given back at the end of the with statement
            dist.all_reduce(x, group=entry.group)
        torch.cuda.current_stream().wait_stream(stream)
        self.streams.checkin(stream)
        return True

    def close(self) -> None:
        self.drain()
        if self.default is not None:
            self.comms.decref(self.default)
            self.default = None
