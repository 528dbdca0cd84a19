"""Pinned host staging ring used for KV offload, reload and cross-tier prefetch. Thread based."""
from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Callable, Optional


@dataclass
class Segment:
    offset: int
    nbytes: int
    view: memoryview


class StagingRing:
    """Equal segments of one pinned buffer. `take` blocks, `poll` does not."""

    def __init__(self, segments: int, seg_bytes: int) -> None:
        self._buf = bytearray(segments * seg_bytes)
        self.seg_bytes = seg_bytes
        self._q: queue.Queue[int] = queue.Queue()
        for i in range(segments):
            self._q.put(i)

    def _wrap(self, i: int) -> Segment:
        off = i * self.seg_bytes
        return Segment(off, self.seg_bytes, memoryview(self._buf)[off:off + self.seg_bytes])

    def take(self) -> Segment:
        return self._wrap(self._q.get())

    def poll(self) -> Optional[Segment]:
        try:
            return self._wrap(self._q.get_nowait())
        except queue.Empty:
            return None

    def put_back(self, seg: Segment) -> None:
        self._q.put(seg.offset // self.seg_bytes)


class Pinned:
    """`with Pinned(ring) as seg:`"""

    def __init__(self, ring: StagingRing) -> None:
        self.ring = ring

    def __enter__(self) -> Segment:
        self.seg = self.ring.take()  # clean: __exit__ puts it back
        return self.seg

    def __exit__(self, *exc) -> None:
        self.ring.put_back(self.seg)


class Offloader:
    def __init__(self, ring: StagingRing, store: "KvStore", workers: int) -> None:
        self.ring = ring
        self.store = store
        self.pool = ThreadPoolExecutor(workers)
        self.pending: dict[int, Segment] = {}
        self.prefetched: dict[int, Segment] = {}
        self._mu = threading.Lock()
        self.dropped = 0

    def save_sync(self, key: int, data: bytes) -> bool:
        with Pinned(self.ring) as seg:  # clean: context manager
            seg.view[:len(data)] = data
            return self.store.write(key, seg.view[:len(data)])

    def save_async(self, key: int, data: bytes) -> Future:
        seg = self.ring.take()  # clean: put back by the done callback
        seg.view[:len(data)] = data
        fut = self.pool.submit(self.store.write, key, seg.view[:len(data)])
        fut.add_done_callback(lambda _f: self.ring.put_back(seg))
        return fut

    def save_many(self, items: dict[int, bytes]) -> int:
        written = 0
        for key, data in items.items():
            seg = self.ring.take()  # leak: entries that do not fit are skipped with the segment held
            if len(data) > seg.nbytes:
                self.dropped += 1
                continue
            seg.view[:len(data)] = data
            if self.store.write(key, seg.view[:len(data)]):
                written += 1
            self.ring.put_back(seg)
        return written

    def save_best_effort(self, key: int, data: bytes) -> bool:
        seg = self.ring.poll()  # clean: near miss, nothing is held on the first return
        if seg is None:
            self.dropped += 1
            return False
        ok = False
        if self.store.has_room(len(data)):
            seg.view[:len(data)] = data
            ok = self.store.write(key, seg.view[:len(data)])
        self.ring.put_back(seg)
        return ok

    def save_dedup(self, key: int, data: bytes) -> Optional[Future]:
        seg = self.ring.take()  # leak: the callback is attached only when a write was needed
        seg.view[:len(data)] = data
        if self.store.contains(key):
            return None
        fut = self.pool.submit(self.store.write, key, seg.view[:len(data)])
        fut.add_done_callback(partial(self._written, seg))
        return fut

    def _written(self, seg: Segment, fut: Future) -> None:
        self.ring.put_back(seg)

    # ---- reading ---------------------------------------------------------

    def _fill(self, key: int) -> Segment:
        seg = self.ring.take()  # clean: handed to the caller
        self.store.read(key, seg.view)
        return seg

    def load_bytes(self, key: int, n: int) -> bytes:
        seg = self._fill(key)  # leak: the bytes are copied out and the segment dropped
        return bytes(seg.view[:n])

    def compare(self, a: int, b: int) -> bool:
        seg = self._fill(a)  # leak: rebound to the second entry before being put back
        left = hash(bytes(seg.view))
        seg = self._fill(b)  # clean: put back at the end
        right = hash(bytes(seg.view))
        self.ring.put_back(seg)
        return left == right

    # ---- prefetch --------------------------------------------------------

    def prefetch(self, keys: list[int]) -> int:
        n = 0
        for key in keys:
            with self._mu:
                if key in self.prefetched:
                    continue
                seg = self.ring.poll()  # clean: near miss, drained by consume or drop_prefetched
                if seg is None:
                    break
                self.prefetched[key] = seg
            self.store.read(key, seg.view)
            n += 1
        return n

    def consume(self, key: int, copy: Callable[[memoryview], None]) -> bool:
        with self._mu:
            seg = self.prefetched.pop(key, None)
        if seg is None:
            return False
        copy(seg.view)
        self.ring.put_back(seg)
        return True

    def drop_prefetched(self) -> None:
        with self._mu:
            stale = list(self.prefetched.values())
            self.prefetched.clear()
        for seg in stale:
            self.ring.put_back(seg)

    # ---- in-flight reloads -----------------------------------------------

    def begin_reload(self, key: int) -> bool:
        if key in self.pending:
            return False
        seg = self.ring.take()  # leak: cancel_reload removes the entry without putting it back
        self.pending[key] = seg
        self.pool.submit(self.store.read, key, seg.view)
        return True

    def finish_reload(self, key: int, copy: Callable[[memoryview], None]) -> None:
        seg = self.pending.pop(key)
        copy(seg.view)
        self.ring.put_back(seg)

    def cancel_reload(self, key: int) -> bool:
        return self.pending.pop(key, None) is not None

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        self.drop_prefetched()


class KvStore:
    """Second tier: a bounded dict standing for the local disk."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._data: dict[int, bytes] = {}

    def has_room(self, n: int) -> bool:
        return self.used + n <= self.limit

    def contains(self, key: int) -> bool:
        return key in self._data

    def write(self, key: int, view: memoryview) -> bool:
        if not self.has_room(len(view)):
            return False
        self._data[key] = bytes(view)
        self.used += len(view)
        return True

    def read(self, key: int, view: memoryview) -> None:
        data = self._data.get(key, b"")
        view[:len(data)] = data


def chained_buffer(ring: StagingRing, src: list[bytes], push: Callable[[memoryview], None]) -> None:
    cur = ring.take()  # clean: put back in the first iteration or after the loop
    for data in src:
        nxt = ring.take()  # clean: becomes cur, which is put back in the next iteration or at the end
        nxt.view[:len(data)] = data
        push(nxt.view[:len(data)])
        ring.put_back(cur)
        cur = nxt
    ring.put_back(cur)


def prime(ring: StagingRing, n: int, fill: int) -> list[int]:
    """Write to every segment once so that the pages are resident."""
    segs = [ring.take() for _ in range(n)]  # leak: the offsets are returned, the segments never put back
    for seg in segs:
        seg.view[:] = bytes([fill]) * seg.nbytes
    return [seg.offset for seg in segs]
