from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Iterator, Optional, Sequence


class PinnedSlab:
    def __init__(self, index: int, capacity: int) -> None:
        self.index = index
        self.capacity = capacity
        self.length = 0
        self.data = bytearray(capacity)


class PinnedPool:
    def __init__(self, capacities: Sequence[int]) -> None:
        self._cond = threading.Condition()
        self._free: deque[PinnedSlab] = deque(PinnedSlab(i, c) for i, c in enumerate(capacities))

    def take(self, nbytes: int) -> PinnedSlab:
        with self._cond:
            while not self._free:
                self._cond.wait()
            slab = self._free.popleft()
            slab.length = min(nbytes, slab.capacity)
            return slab

    def take_fitting(self, nbytes: int) -> Optional[PinnedSlab]:
        with self._cond:
            while self._free:
                slab = self._free.popleft()  # leak: slabs too small for the request are dropped on the way to one that fits
                if slab.capacity >= nbytes:
                    slab.length = nbytes
                    return slab
            return None

    def take_largest(self) -> Optional[PinnedSlab]:
        with self._cond:
            best: Optional[PinnedSlab] = None
            for _ in range(len(self._free)):
                slab = self._free.popleft()  # clean: near miss, the loser of each comparison goes back to the queue
                if best is None:
                    best = slab
                elif slab.capacity > best.capacity:
                    self._free.append(best)
                    best = slab
                else:
                    self._free.append(slab)
            return best

    def give(self, slab: PinnedSlab) -> None:
        with self._cond:
            slab.length = 0
            self._free.append(slab)
            self._cond.notify()


class CopyEvent:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class EventPool:
    def __init__(self, size: int) -> None:
        self._idle = [CopyEvent() for _ in range(size)]

    def acquire(self) -> Optional[CopyEvent]:
        return self._idle.pop() if self._idle else None

    def recycle(self, event: CopyEvent) -> None:
        event.done = False
        self._idle.append(event)


class DiskTier:
    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def read_into(self, key: str, slab: PinnedSlab) -> bool:
        blob = self._blobs.get(key)
        if blob is None or len(blob) > slab.capacity:
            return False
        slab.data[: len(blob)] = blob
        slab.length = len(blob)
        return True

    def write_from(self, key: str, slab: PinnedSlab) -> None:
        self._blobs[key] = bytes(slab.data[: slab.length])


class KVOffloader:
    def __init__(self, pool: PinnedPool, events: EventPool, disk: DiskTier) -> None:
        self.pool = pool
        self.events = events
        self.disk = disk
        self.inflight: deque[tuple[str, PinnedSlab, CopyEvent]] = deque()
        self.loads: dict[str, tuple[PinnedSlab, CopyEvent]] = {}

    def offload(self, key: str, payload: bytes) -> bool:
        event = self.events.acquire()  # leak: poll() hands back the slab of a finished copy but never recycles its event
        if event is None:
            return False
        slab = self.pool.take(len(payload))  # clean: queued in inflight and given back by poll()
        slab.data[: slab.length] = payload[: slab.length]
        self.inflight.append((key, slab, event))
        return True

    def poll(self) -> int:
        finished = 0
        while self.inflight:
            key, slab, event = self.inflight[0]
            if not event.query():
                break
            self.inflight.popleft()
            self.disk.write_from(key, slab)
            self.pool.give(slab)
            finished += 1
        return finished

    def begin_load(self, key: str) -> bool:
        slab = self.pool.take_largest()  # clean: near miss, given back on both refusals and otherwise kept in loads
        if slab is None:
            return False
        if not self.disk.read_into(key, slab):
            self.pool.give(slab)
            return False
        event = self.events.acquire()  # clean: kept in loads with the slab, end_load recycles it
        if event is None:
            self.pool.give(slab)
            return False
        stale = self.loads.pop(key, None)
        if stale is not None:
            self._retire(*stale)
        self.loads[key] = (slab, event)
        return True

    def end_load(self, key: str) -> None:
        entry = self.loads.pop(key, None)
        if entry is not None:
            self._retire(*entry)

    def _retire(self, slab: PinnedSlab, event: CopyEvent) -> None:
        self.events.recycle(event)
        self.pool.give(slab)

    def restore(self, keys: Sequence[str], sink: dict[str, bytes]) -> None:
        for key in keys:
            slab = self.pool.take_fitting(1 << 20)  # leak: a key the disk lacks continues to the next one without giving the slab back
            if slab is None:
                break
            if not self.disk.read_into(key, slab):
                continue
            sink[key] = bytes(slab.data[: slab.length])
            self.pool.give(slab)

    @contextlib.contextmanager
    def staging(self, nbytes: int) -> Iterator[PinnedSlab]:
        slab = self.pool.take(nbytes)  # clean: given back in the finally
        try:
            yield slab
        finally:
            self.pool.give(slab)

    def stream_chunks(self, keys: Sequence[str]) -> Iterator[memoryview]:
        slab = self.pool.take(1 << 20)  # leak: a consumer that stops early closes the generator at the yield, before the give
        for key in keys:
            if self.disk.read_into(key, slab):
                yield memoryview(slab.data)[: slab.length]
        self.pool.give(slab)

    def first_chunk_over(self, keys: Sequence[str], size: int) -> Optional[bytes]:
        for view in self.stream_chunks(keys):
            if len(view) > size:
                return bytes(view)
        return None

    def checksum(self, key: str) -> Optional[int]:
        with self.staging(1 << 20) as slab:  # clean: near miss, the early return leaves through the context manager
            if not self.disk.read_into(key, slab):
                return None
            return sum(slab.data[: slab.length])
