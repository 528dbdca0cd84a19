"""Communicators for overlapping collectives: shared channels, event recycling, stream leases."""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Deque, Dict, List, Sequence, Tuple

import torch

log = logging.getLogger(__name__)

GroupKey = Tuple[int, ...]


class EventPool:
    def __init__(self, limit: int):
        self._free: Deque = deque(torch.cuda.Event() for _ in range(limit))
        self._mutex = threading.Lock()

    def get(self):
        with self._mutex:
            return self._free.popleft()

    def recycle(self, event) -> None:
        with self._mutex:
            self._free.append(event)


class StreamSet:
    """A few side streams; a caller holds one exclusively."""

    def __init__(self, count: int):
        self._streams = [torch.cuda.Stream() for _ in range(count)]
        self._permits = threading.Semaphore(count)
        self._idle = deque(self._streams)

    def obtain(self):
        self._permits.acquire()  # clean: released by surrender
        return self._idle.popleft()

    def surrender(self, stream) -> None:
        self._idle.append(stream)
        self._permits.release()

    def grow(self, extra: int) -> None:
        for _ in range(extra):
            self._idle.append(torch.cuda.Stream())
            self._permits.release()


@dataclass
class Channel:
    key: GroupKey
    handle: object
    refs: int = 0
    aborted: bool = False


class ChannelRegistry:
    """Communicator handles, shared between the users of one rank set."""

    def __init__(self, factory: Callable[[GroupKey], object]):
        self._factory = factory
        self._table: Dict[GroupKey, Channel] = {}
        self._mutex = threading.Lock()

    def attach(self, key: GroupKey) -> Channel:
        with self._mutex:
            channel = self._table.get(key)
            if channel is None:
                channel = self._table[key] = Channel(key, self._factory(key))
            channel.refs += 1
            return channel

    def detach(self, channel: Channel) -> None:
        with self._mutex:
            channel.refs -= 1
            if channel.refs == 0:
                del self._table[channel.key]
                channel.handle.destroy()

    def is_shared(self, key: GroupKey) -> bool:
        channel = self.attach(key)  # leak: the early return for an aborted channel keeps the reference
        if channel.aborted:
            return False
        shared = channel.refs > 2
        self.detach(channel)
        return shared


@dataclass
class Work:
    event: object
    stream: object
    callbacks: List[Callable[[], None]] = field(default_factory=list)

    def wait(self) -> None:
        self.event.synchronize()
        for callback in self.callbacks:
            callback()
        self.callbacks.clear()


class Communicator:
    def __init__(
        self, ranks: Sequence[int], registry: ChannelRegistry, events: EventPool, streams: StreamSet
    ):
        self.key = tuple(sorted(ranks))
        self.registry = registry
        self.events = events
        self.streams = streams
        self.channel = registry.attach(self.key)  # clean: near miss, detached by shutdown
        self._pending: List[Work] = []
        self._launch = threading.Lock()

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        stream = self.streams.obtain()  # clean: near miss, surrendered by the callback of the work
        event = self.events.get()  # clean: near miss, recycled by the callback of the work
        with torch.cuda.stream(stream):
            self.channel.handle.all_reduce(tensor)
            event.record(stream)
        work = Work(event, stream)
        work.callbacks.append(lambda: self.streams.surrender(stream))
        work.callbacks.append(lambda: self.events.recycle(event))
        self._pending.append(work)
        return work

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        stream = self.streams.obtain()  # clean: surrendered by the callback of the work
        event = self.events.get()  # leak: no callback recycles the event
        with torch.cuda.stream(stream):
            self.channel.handle.broadcast(tensor, root)
            event.record(stream)
        work = Work(event, stream, [lambda: self.streams.surrender(stream)])
        self._pending.append(work)
        return work

    def barrier(self, *, fast: bool = False) -> None:
        stream = self.streams.obtain()  # clean: surrendered at the end
        event = None
        if not fast:
            event = self.events.get()  # clean: near miss, recycled under a guard that means the same
        self.channel.handle.barrier(stream)
        if event is not None:
            event.record(stream)
            event.synchronize()
            self.events.recycle(event)
        self.streams.surrender(stream)

    def timed_gather(self, tensor: torch.Tensor, out: torch.Tensor, profile: bool, verbose: bool) -> float:
        elapsed = 0.0
        begin = self.events.get() if profile else None  # leak: recycled for verbose callers only
        self.channel.handle.all_gather(out, tensor)
        if profile:
            torch.cuda.synchronize()
            elapsed = float(tensor.numel())
            if verbose:
                log.info("gathered %.0f elements", elapsed)
                self.events.recycle(begin)
        return elapsed

    def send_exclusive(self, tensor: torch.Tensor, peer: int) -> bool:
        self._launch.acquire()  # leak: the return for an unknown peer keeps the lock
        if peer not in self.key:
            log.error("peer %d is not in %s", peer, self.key)
            return False
        self.channel.handle.send(tensor, peer)
        self._launch.release()
        return True

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()

    def shutdown(self) -> None:
        self.flush()
        self.registry.detach(self.channel)


class SplitCommunicator(Communicator):
    """Adds a channel for each half of the rank set."""

    def __init__(self, ranks, registry, events, streams):
        super().__init__(ranks, registry, events, streams)
        half = len(self.key) // 2
        self.low = registry.attach(self.key[:half])  # clean: detached by the overridden shutdown
        self.high = registry.attach(self.key[half:])  # leak: shutdown detaches the low half only
        self._owns_stream = True
        self.stream = streams.obtain()  # clean: near miss, surrendered by shutdown or by lend_stream's taker

    def hierarchical(self, tensor: torch.Tensor) -> None:
        mine = self.low if tensor.device.index in self.low.key else self.high
        with torch.cuda.stream(self.stream):
            mine.handle.all_reduce(tensor)
            self.channel.handle.all_reduce(tensor)

    def lend_stream(self, taker: Callable[[object], None]) -> None:
        """Hand the stream to a taker, who surrenders it."""
        if self._owns_stream:
            self._owns_stream = False
            taker(self.stream)

    def shutdown(self) -> None:
        if self._owns_stream:
            self.streams.surrender(self.stream)
        self.registry.detach(self.low)
        super().shutdown()
