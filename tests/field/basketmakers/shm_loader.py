"""Shared-memory ring for data-loader workers."""
from __future__ import annotations

import itertools
import logging
import queue
from multiprocessing import shared_memory
from typing import Callable, Iterable, Iterator, Optional

import numpy as np

log = logging.getLogger(__name__)


class ShmRing:
    """Named segments of one size; borrow() waits up to timeout and gives None after it."""

    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._segs = {i: shared_memory.SharedMemory(create=True, size=nbytes) for i in range(count)}  # clean: kept in _segs, destroy() closes and unlinks
        self._ready: "queue.SimpleQueue[int]" = queue.SimpleQueue()
        for i in self._segs:
            self._ready.put(i)

    def borrow(self, timeout: float = 1.0) -> Optional[int]:
        try:
            return self._ready.get(timeout=timeout)
        except queue.Empty:
            return None

    def repay(self, seg: int) -> None:
        self._ready.put(seg)

    def view(self, seg: int, n: int) -> np.ndarray:
        return np.ndarray((n,), dtype=np.uint8, buffer=self._segs[seg].buf)

    def destroy(self) -> None:
        for shm in self._segs.values():
            shm.close()
            shm.unlink()
        self._segs.clear()


class PrioRing:
    """Wraps a ring, keeps a few segments for urgent callers."""

    def __init__(self, inner: ShmRing, kept: int):
        self.inner = inner
        self.kept: list[int] = []
        self.kept_max = kept
        while len(self.kept) < kept:
            seg = inner.borrow(0.0)  # clean: moved into kept, which close() repays
            if seg is None:
                break
            self.kept.append(seg)

    def borrow(self, urgent: bool = False) -> Optional[int]:
        seg = self.inner.borrow(0.0)  # clean: returned to the caller
        if seg is None and urgent and self.kept:
            return self.kept.pop()
        return seg

    def borrow_even(self) -> Optional[int]:
        seg = self.inner.borrow(0.1)  # leak: an odd segment is refused and not repaid to the inner ring
        if seg is not None and seg % 2 == 0:
            return seg
        return None

    def repay(self, seg: int) -> None:
        if len(self.kept) < self.kept_max:
            self.kept.append(seg)
        else:
            self.inner.repay(seg)

    def close(self) -> None:
        while self.kept:
            self.inner.repay(self.kept.pop())


class Batch:
    def __init__(self, index: int, ring: ShmRing, seg: int, size: int):
        self.index = index
        self._ring = ring
        self._seg: Optional[int] = seg
        self.size = size

    def array(self) -> np.ndarray:
        return self._ring.view(self._seg, self.size)

    def release(self) -> None:
        if self._seg is not None:
            self._ring.repay(self._seg)
            self._seg = None

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


class WorkerLoop:
    def __init__(self, ring: ShmRing, decode: Callable[[str], Optional[bytes]]):
        self.ring = ring
        self.decode = decode
        self.out: "queue.Queue[Batch]" = queue.Queue()
        self.skipped = 0

    def make(self, index: int, path: str) -> Optional[Batch]:
        seg = self.ring.borrow()  # leak: a sample that decodes to None leaves the segment unpaid
        if seg is None:
            return None
        data = self.decode(path)
        if data is None:
            self.skipped += 1
            return None
        self.ring.view(seg, len(data))[:] = np.frombuffer(data, np.uint8)
        return Batch(index, self.ring, seg, len(data))

    def make_checked(self, index: int, path: str) -> Optional[Batch]:
        data = self.decode(path)
        if data is None or len(data) > self.ring.nbytes:
            return None
        seg = self.ring.borrow()  # clean: owned by the returned batch
        if seg is None:
            return None
        self.ring.view(seg, len(data))[:] = np.frombuffer(data, np.uint8)
        return Batch(index, self.ring, seg, len(data))

    def run(self, paths: Iterable[str]) -> None:
        for i, path in enumerate(paths):
            batch = self.make_checked(i, path)  # clean: put in the out queue, consumers release it
            if batch is not None:
                self.out.put(batch)

    def consume(self, sink: Callable[[np.ndarray], None]) -> int:
        n = 0
        while not self.out.empty():
            with self.out.get() as batch:
                sink(batch.array())
                n += 1
        return n

    def fill(self, seg: int, parts: list[bytes]) -> int:
        at = 0
        dst = self.ring.view(seg, self.ring.nbytes)
        for p in parts:
            dst[at:at + len(p)] = np.frombuffer(p, np.uint8)
            at += len(p)
        return at

    def coalesce(self, groups: list[list[bytes]]) -> list[Batch]:
        done = []
        for i, parts in enumerate(groups):
            seg = self.ring.borrow()  # clean: near miss, the empty group repays it before continue
            if seg is None:
                break
            if not parts:
                self.ring.repay(seg)
                continue
            done.append(Batch(i, self.ring, seg, self.fill(seg, parts)))
        return done

    def coalesce_large(self, groups: list[list[bytes]], limit: int) -> list[Batch]:
        done = []
        for i, parts in enumerate(groups):
            seg = self.ring.borrow()  # leak: groups over the limit are logged and skipped with the segment
            if seg is None:
                break
            if sum(map(len, parts)) > limit:
                log.warning("group %d over %d bytes", i, limit)
                continue
            done.append(Batch(i, self.ring, seg, self.fill(seg, parts)))
        return done


class Loader:
    def __init__(self, loop: WorkerLoop, ring: ShmRing):
        self.loop = loop
        self.ring = ring
        self.by_index: dict[int, Batch] = {}

    def batches(self, paths: list[str]) -> Iterator[np.ndarray]:
        for i, path in enumerate(paths):
            batch = self.loop.make_checked(i, path)  # clean: released in finally, also if the generator is closed
            if batch is None:
                continue
            try:
                yield batch.array()
            finally:
                batch.release()

    def pairs(self, paths: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        prev: Optional[Batch] = None
        for i, path in enumerate(paths):
            cur = self.loop.make_checked(i, path)  # leak: the last batch is still in prev when the paths end
            if cur is None:
                continue
            if prev is not None:
                yield prev.array(), cur.array()
                prev.release()
            prev = cur

    def ordered(self, paths: list[str]) -> None:
        self.clear()
        for i, path in enumerate(paths):
            b = self.loop.make_checked(i, path)  # clean: near miss, kept in by_index until take() or clear()
            if b is not None:
                self.by_index[i] = b

    def take(self, i: int) -> Optional[bytes]:
        b = self.by_index.pop(i, None)
        if b is None:
            return None
        with b:
            return b.array().tobytes()

    def clear(self) -> None:
        for b in self.by_index.values():
            b.release()
        self.by_index.clear()

    def first(self, paths: list[str]) -> Optional[bytes]:
        for i, path in enumerate(itertools.islice(paths, 8)):
            b = self.loop.make_checked(i, path)  # clean: with releases it on return
            if b is None:
                continue
            with b:
                return b.array().tobytes()
        return None

    def sizes(self, paths: list[str]) -> list[int]:
        made = (self.loop.make_checked(i, p) for i, p in enumerate(paths))  # leak: only the sizes are read, no batch is released
        return [b.size for b in made if b is not None]
