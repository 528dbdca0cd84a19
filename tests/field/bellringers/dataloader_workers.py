"""Shared-memory segments between loader workers and the trainer process."""
from __future__ import annotations

import queue
import threading
from multiprocessing import shared_memory
from typing import Callable, Dict, Iterable, Iterator, List, Optional

import numpy as np
import torch


class Segment:
    __slots__ = ("shm", "size", "fill", "epoch")

    def __init__(self, size: int) -> None:
        self.shm = shared_memory.SharedMemory(create=True, size=size)
        self.size = size
        self.fill = 0
        self.epoch = -1

    def array(self, shape, dtype=np.float32) -> np.ndarray:
        return np.ndarray(shape, dtype=dtype, buffer=self.shm.buf)


class SegmentPool:
    def __init__(self, size: int, count: int) -> None:
        self._idle: List[Segment] = [Segment(size) for _ in range(count)]
        self._cv = threading.Condition()

    def rent(self, wait: Optional[float] = None) -> Optional[Segment]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle, timeout=wait):
                return None
            seg = self._idle.pop()
        seg.fill = 0
        return seg

    def rent_for(self, epoch: int) -> Optional[Segment]:
        """Like rent(), preferring a segment that still holds this epoch's data."""
        with self._cv:
            while self._idle:
                seg = self._idle.pop()  # leak: segments of other epochs are popped and not put back
                if seg.epoch == epoch:
                    return seg
        return None

    def hand_back(self, seg: Segment) -> None:
        with self._cv:
            self._idle.append(seg)
            self._cv.notify()

    def shrink(self, keep: int) -> int:
        dropped = 0
        with self._cv:
            while len(self._idle) > keep:
                seg = self._idle.pop()  # clean: near miss, the segment is closed and unlinked for good
                seg.shm.close()
                seg.shm.unlink()
                dropped += 1
        return dropped


Sample = Dict[str, np.ndarray]


class Worker(threading.Thread):
    def __init__(self, pool: SegmentPool, indices: "queue.Queue[Optional[List[int]]]",
                 out: "queue.Queue[Optional[Segment]]", fetch: Callable[[int], Optional[Sample]]) -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.indices = indices
        self.out = out
        self.fetch = fetch
        self.dropped = 0

    def run(self) -> None:
        while True:
            batch = self.indices.get()
            if batch is None:
                self.out.put(None)
                return
            seg = self.pool.rent()  # leak: not handed back for a batch whose samples are all missing
            samples = [s for s in map(self.fetch, batch) if s is not None]
            if not samples:
                self.dropped += 1
                continue
            self._pack(seg, samples)
            self.out.put(seg)

    def _pack(self, seg: Segment, samples: List[Sample]) -> None:
        x = np.stack([s["x"] for s in samples])
        seg.array(x.shape)[...] = x
        seg.fill = x.shape[0]


class Loader:
    def __init__(self, pool: SegmentPool, out: "queue.Queue[Optional[Segment]]", shape) -> None:
        self.pool = pool
        self.out = out
        self.shape = shape
        self.ahead: Dict[int, Segment] = {}
        self.spare: Optional[Segment] = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            seg = self.out.get()
            if seg is None:
                return
            try:
                yield torch.from_numpy(seg.array((seg.fill,) + self.shape)).clone()
            finally:
                self.pool.hand_back(seg)

    def stage(self, step: int, x: torch.Tensor) -> bool:
        if step in self.ahead:
            return True
        seg = self.pool.rent(wait=0.5)  # clean: near miss, kept in ahead, take() hands it back and rewind() the rest
        if seg is None:
            return False
        seg.array(tuple(x.shape))[...] = x.numpy()
        seg.fill = x.shape[0]
        self.ahead[step] = seg
        return True

    def take(self, step: int) -> Optional[torch.Tensor]:
        seg = self.ahead.pop(step, None)
        if seg is None:
            return None
        x = torch.from_numpy(seg.array((seg.fill,) + self.shape)).clone()
        self.pool.hand_back(seg)
        return x

    def rewind(self) -> None:
        for seg in self.ahead.values():
            self.pool.hand_back(seg)
        self.ahead.clear()

    def keep_spare(self) -> None:
        seg = self.pool.rent(wait=0.0)  # clean: near miss, handed back when there is a spare already
        if seg is None:
            return
        if self.spare is not None:
            self.pool.hand_back(seg)
        else:
            self.spare = seg

    def drop_spare(self) -> None:
        if self.spare is not None:
            self.pool.hand_back(self.spare)
            self.spare = None


class EvalCache:
    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self.rows: Dict[str, Segment] = {}

    def remember(self, key: str, x: np.ndarray) -> None:
        seg = self.pool.rent()  # leak: a key remembered twice overwrites its segment, and clear() forgets all of them
        seg.array(x.shape)[...] = x
        seg.fill = len(x)
        self.rows[key] = seg

    def clear(self) -> None:
        self.rows = {}


def _decode_into(pool: SegmentPool, raw: bytes) -> Segment:
    seg = pool.rent()  # clean: returned to the caller
    a = np.frombuffer(raw, dtype=np.float32)
    seg.array(a.shape)[...] = a
    seg.fill = a.shape[0]
    return seg


def mean_of(pool: SegmentPool, raw: bytes) -> float:
    seg = _decode_into(pool, raw)  # clean: handed back after the mean
    m = float(seg.array((seg.fill,)).mean())
    pool.hand_back(seg)
    return m


def decode(pool: SegmentPool, raw: bytes) -> np.ndarray:
    seg = _decode_into(pool, raw)  # leak: a copy is returned and the segment dropped
    return np.array(seg.array((seg.fill,)))


def decode_all(pool: SegmentPool, blobs: Iterable[bytes]) -> Iterator[np.ndarray]:
    seg = None
    try:
        for raw in blobs:
            seg = _decode_into(pool, raw)  # clean: near miss, each is handed back before the next or in finally
            yield np.array(seg.array((seg.fill,)))
            pool.hand_back(seg)
            seg = None
    finally:
        if seg is not None:
            pool.hand_back(seg)


def pairs(pool: SegmentPool, left: Iterable[bytes], right: Iterable[bytes]) -> Iterator[float]:
    for a, b in zip(left, right):
        sa = _decode_into(pool, a)  # clean: handed back on both ways
        sb = _decode_into(pool, b)  # leak: not handed back when the lengths differ
        if sa.fill != sb.fill:
            pool.hand_back(sa)
            continue
        dot = float(sa.array((sa.fill,)) @ sb.array((sb.fill,)))
        pool.hand_back(sb)
        pool.hand_back(sa)
        yield dot


def warm(pool: SegmentPool, n: int) -> int:
    held: List[Segment] = []
    for _ in range(n):
        seg = pool.rent(wait=0.0)  # clean: all in held are handed back below
        if seg is None:
            break
        seg.shm.buf[:] = bytes(seg.size)
        held.append(seg)
    for seg in held:
        pool.hand_back(seg)
    return len(held)
