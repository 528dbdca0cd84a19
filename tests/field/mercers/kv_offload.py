"""Offloading cold KV blocks to pinned host memory and to disk."""
from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional

MIN_CLASS = 1 << 16


@dataclass(eq=False)
class Segment:
    base: int
    nbytes: int


class HostArena:
    """Address space of page locked memory. Every mapping must be unmapped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.mapped = 0
        self._next = 0

    def map(self, nbytes: int) -> Segment:
        seg = Segment(self._next, nbytes)
        self._next += nbytes
        self.mapped += nbytes
        return seg

    def unmap(self, seg: Segment) -> None:
        self.mapped -= seg.nbytes


class PinnedPool:
    """Power of two size classes over the arena."""

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self._mu = threading.Lock()
        self._shelf: Dict[int, List[Segment]] = {}

    @staticmethod
    def _size_class(nbytes: int) -> int:
        size = MIN_CLASS
        while size < nbytes:
            size *= 2
        return size

    def get(self, nbytes: int) -> Optional[Segment]:
        size = self._size_class(nbytes)
        with self._mu:
            shelf = self._shelf.setdefault(size, [])
            if shelf:
                return shelf.pop()
            if self.arena.mapped + size > self.arena.limit:
                return None
            return self.arena.map(size)  # leak: trim cuts segments off the shelf and never unmaps them

    def put(self, seg: Segment) -> None:
        with self._mu:
            self._shelf.setdefault(seg.nbytes, []).append(seg)

    def trim(self, keep: int = 4) -> None:
        """Called under memory pressure."""
        with self._mu:
            for size, shelf in self._shelf.items():
                self._shelf[size] = shelf[:keep]

    def close(self) -> None:
        with self._mu:
            for shelf in self._shelf.values():
                for seg in shelf:
                    self.arena.unmap(seg)
            self._shelf.clear()


class ScratchPool:
    """One size only, used for checksums."""

    def __init__(self, arena: HostArena, nbytes: int) -> None:
        self.arena = arena
        self.nbytes = nbytes
        self._shelf: List[Segment] = []

    def get(self) -> Segment:
        if self._shelf:
            return self._shelf.pop()
        return self.arena.map(self.nbytes)  # clean: near miss, put unmaps what the shelf has no room for

    def put(self, seg: Segment) -> None:
        if len(self._shelf) < 8:
            self._shelf.append(seg)
        else:
            self.arena.unmap(seg)

    def close(self) -> None:
        while self._shelf:
            self.arena.unmap(self._shelf.pop())


class StreamPool:
    def __init__(self, n: int) -> None:
        self._ready: Deque[int] = deque(range(n))

    def borrow(self) -> Optional[int]:
        return self._ready.popleft() if self._ready else None

    def give_back(self, stream: int) -> None:
        self._ready.append(stream)


class Event:
    def __init__(self) -> None:
        self.recorded_on: Optional[int] = None

    def record(self, stream: int) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        return self.recorded_on is not None


class EventPool:
    def __init__(self) -> None:
        self._spare: List[Event] = [Event() for _ in range(128)]

    def obtain(self) -> Event:
        return self._spare.pop()

    def reclaim(self, ev: Event) -> None:
        ev.recorded_on = None
        self._spare.append(ev)


@dataclass
class Inflight:
    block: int
    seg: Segment
    event: Event
    stream: int


class Offloader:
    def __init__(self, pinned: PinnedPool, streams: StreamPool, events: EventPool, root: str) -> None:
        self.pinned = pinned
        self.streams = streams
        self.events = events
        self.root = root
        self.inflight: Deque[Inflight] = deque()
        self.prefetching: Deque[Inflight] = deque()
        self.resident: Dict[int, Segment] = {}
        self.copied: Dict[int, int] = {}

    def _memcpy(self, block: int, seg: Segment, stream: int) -> None:
        self.copied[block] = self.copied.get(block, 0) + seg.nbytes

    def store(self, block: int, nbytes: int) -> bool:
        seg = self.pinned.get(nbytes)  # clean: put back without a stream, else inflight, resident, evict
        if seg is None:
            return False
        stream = self.streams.borrow()  # clean: near miss, travels in inflight, given back by reap
        if stream is None:
            self.pinned.put(seg)
            return False
        ev = self.events.obtain()  # clean: travels in inflight, reclaimed by reap
        self._memcpy(block, seg, stream)
        ev.record(stream)
        self.inflight.append(Inflight(block, seg, ev, stream))
        return True

    def reap(self) -> int:
        done = 0
        while self.inflight and self.inflight[0].event.query():
            op = self.inflight.popleft()
            self.events.reclaim(op.event)
            self.streams.give_back(op.stream)
            old = self.resident.pop(op.block, None)
            if old is not None:
                self.pinned.put(old)
            self.resident[op.block] = op.seg
            done += 1
        return done

    def evict(self, block: int) -> bool:
        seg = self.resident.pop(block, None)
        if seg is None:
            return False
        self.pinned.put(seg)
        return True

    def prefetch(self, block: int, nbytes: int) -> bool:
        stream = self.streams.borrow()  # clean: given back without a segment, else by reap_prefetch
        if stream is None:
            return False
        seg = self.pinned.get(nbytes)  # clean: in prefetching, put back by reap_prefetch
        if seg is None:
            self.streams.give_back(stream)
            return False
        ev = self.events.obtain()  # leak: reap_prefetch gives back segment and stream but not the event
        self._memcpy(block, seg, stream)
        ev.record(stream)
        self.prefetching.append(Inflight(block, seg, ev, stream))
        return True

    def reap_prefetch(self, on_ready: Callable[[int], None]) -> None:
        still: Deque[Inflight] = deque()
        while self.prefetching:
            op = self.prefetching.popleft()
            if not op.event.query():
                still.append(op)
                continue
            on_ready(op.block)
            self.pinned.put(op.seg)
            self.streams.give_back(op.stream)
        self.prefetching = still

    def is_settled(self, stream: int) -> bool:
        """Has everything on the stream run?"""
        ev = self.events.obtain()  # leak: the positive answer returns before reclaim
        ev.record(stream)
        for _ in range(1000):
            if ev.query():
                return True
        self.events.reclaim(ev)
        return False

    def gather(self, blocks: List[int], nbytes: int) -> Optional[Segment]:
        """One contiguous segment for several blocks, with the header if it does not fit."""
        seg = self.pinned.get(nbytes * len(blocks))  # leak: lost when the header makes it grow
        if seg is None:
            return None
        header = 8 * len(blocks)
        if seg.nbytes < nbytes * len(blocks) + header:
            seg = self.pinned.get(nbytes * len(blocks) + header)  # clean: handed to the caller
        return seg

    def spill(self, block: int) -> bool:
        seg = self.resident.get(block)
        if seg is None:
            return False
        fh = open(os.path.join(self.root, f"{block}.kv"), "wb")  # leak: an oversized segment returns unclosed
        if seg.nbytes > 1 << 28:
            return False
        fh.write(seg.base.to_bytes(8, "little"))
        fh.close()
        return True


def checksum(pool: ScratchPool, values: List[int]) -> int:
    seg = pool.get()  # clean: put back on the one way out
    acc = seg.base & 0
    for v in values:
        acc = (acc * 131 + v) & 0xFFFFFFFF
    pool.put(seg)
    return acc
