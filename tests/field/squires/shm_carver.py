"""Shared memory between the dataset processes and the trainer: one segment, carved into regions.

Only offsets travel through the pipes. The parent process carves and mends, children just read and write.
"""
from __future__ import annotations

import bisect
import logging
import struct
import threading
from dataclasses import dataclass
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from typing import Iterator, NamedTuple

import numpy as np

log = logging.getLogger("data.shm")

ALIGN = 64
HEADER = struct.Struct("<QQ")


class SegmentFull(Exception):
    pass


class WorkerGone(Exception):
    pass


class Region(NamedTuple):
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Carver:
    """First fit over a sorted list of holes. Neighbours are joined when a region is mended."""

    def __init__(self, segment: shared_memory.SharedMemory):
        self.segment = segment
        self._holes: list[Region] = [Region(0, segment.size)]
        self._mutex = threading.Lock()
        self.carved = 0

    def carve(self, nbytes: int) -> Region:
        size = -(-nbytes // ALIGN) * ALIGN
        with self._mutex:
            for i, hole in enumerate(self._holes):
                if hole.size < size:
                    continue
                hole = self._holes.pop(i)  # leak: a rest of less than two lines is neither part of the region nor a hole any more
                rest = Region(hole.offset + size, hole.size - size)
                if rest.size >= 2 * ALIGN:
                    self._holes.insert(i, rest)
                self.carved += 1
                return Region(hole.offset, size)
        raise SegmentFull(f"{size} bytes, largest hole {max((h.size for h in self._holes), default=0)}")

    def carve_or_none(self, nbytes: int) -> Region | None:
        try:
            return self.carve(nbytes)  # clean: returned to the caller
        except SegmentFull:
            return None

    def mend(self, region: Region) -> None:
        with self._mutex:
            i = bisect.bisect_left(self._holes, region)
            if i < len(self._holes) and self._holes[i].offset == region.end:
                region = Region(region.offset, region.size + self._holes.pop(i).size)  # clean: near miss, the neighbour becomes part of the hole inserted below
            if i > 0 and self._holes[i - 1].end == region.offset:
                before = self._holes.pop(i - 1)  # clean: near miss, joined with the region and inserted again
                region = Region(before.offset, before.size + region.size)
                i -= 1
            self._holes.insert(i, region)

    def view(self, region: Region, dtype=np.uint8) -> np.ndarray:
        return np.frombuffer(self.segment.buf, dtype, region.size // np.dtype(dtype).itemsize, region.offset)


@dataclass
class Worker:
    rank: int
    pipe: Connection

    def ask(self, index: int, region: Region) -> int:
        self.pipe.send_bytes(HEADER.pack(index, region.offset))
        if not self.pipe.poll(30.0):
            raise WorkerGone(f"worker {self.rank} is silent")
        used, _ = HEADER.unpack(self.pipe.recv_bytes())
        return used


class SampleReader:
    def __init__(self, carver: Carver, workers: list[Worker], sample_bytes: int):
        self._carver = carver
        self._workers = workers
        self._sample_bytes = sample_bytes
        self.skipped = 0

    def read(self, index: int) -> np.ndarray | None:
        worker = self._workers[index % len(self._workers)]
        region = self._carver.carve(self._sample_bytes)  # leak: the handler for WorkerGone returns None and the region stays carved
        try:
            used = worker.ask(index, region)
        except WorkerGone as exc:
            log.error("sample %d skipped: %s", index, exc)
            self.skipped += 1
            return None
        sample = self._carver.view(region)[:used].copy()
        self._carver.mend(region)
        return sample

    def read_checked(self, index: int) -> np.ndarray:
        region = self._carver.carve(self._sample_bytes + HEADER.size)  # clean: mended in the finally
        try:
            used = self._workers[0].ask(index, region)
            if used == 0:
                raise ValueError(f"sample {index} is empty")
            return self._carver.view(region)[:used].copy()
        finally:
            self._carver.mend(region)


class Batch:
    """Regions of one batch. The trainer calls done() when the arrays are on the device."""

    def __init__(self, carver: Carver):
        self._carver = carver
        self._regions: list[Region] = []
        self._index: Region | None = None

    def add(self, nbytes: int) -> np.ndarray:
        region = self._carver.carve(nbytes)  # clean: near miss, owned by the batch until done()
        self._regions.append(region)
        return self._carver.view(region)

    def build_index(self) -> None:
        if self._index is not None or not self._regions:
            return
        self._index = self._carver.carve(16 * len(self._regions))  # leak: done() mends the samples and leaves out the index
        table = self._carver.view(self._index, np.uint64)
        for i, region in enumerate(self._regions):
            table[2 * i:2 * i + 2] = region

    def arrays(self) -> Iterator[np.ndarray]:
        for region in self._regions:
            yield self._carver.view(region)

    def done(self) -> None:
        for region in self._regions:
            self._carver.mend(region)
        self._regions = []
        self._index = None


def collate(carver: Carver, samples: list[np.ndarray]) -> Batch:
    batch = Batch(carver)
    try:
        for sample in samples:
            batch.add(sample.nbytes)[:sample.nbytes] = sample.view(np.uint8).ravel()  # clean: goes back by done(), here or in the trainer
    except SegmentFull:
        batch.done()
        raise
    return batch


class Mailbox:
    """Last message of each rank, in shared memory. Messages grow now and then."""

    def __init__(self, carver: Carver):
        self._carver = carver
        self._slots: dict[int, Region] = {}

    def post(self, rank: int, payload: bytes) -> None:
        region = self._slots.get(rank)
        if region is None or region.size < len(payload):
            region = self._carver.carve(len(payload))  # leak: when a message outgrows its region, the old one is overwritten in the table
            self._slots[rank] = region
        self._carver.view(region)[:len(payload)] = np.frombuffer(payload, np.uint8)

    def leave(self, rank: int) -> None:
        region = self._slots.pop(rank, None)
        if region is not None:
            self._carver.mend(region)

    def close(self) -> None:
        for rank in list(self._slots):
            self.leave(rank)


class GrowingBuffer:
    """Append-only bytes that move to a larger region when needed."""

    def __init__(self, carver: Carver, nbytes: int = 4096):
        self._carver = carver
        self.length = 0
        self._region = carver.carve(nbytes)  # clean: near miss, mended by append() after the move, or by close()

    def append(self, data: bytes) -> None:
        if self.length + len(data) > self._region.size:
            larger = self._carver.carve(2 * (self.length + len(data)))  # clean: near miss, becomes the region of the buffer
            self._carver.view(larger)[:self.length] = self._carver.view(self._region)[:self.length]
            old, self._region = self._region, larger
            self._carver.mend(old)
        self._carver.view(self._region)[self.length:self.length + len(data)] = np.frombuffer(data, np.uint8)
        self.length += len(data)

    def close(self) -> None:
        self._carver.mend(self._region)


def exchange(carver: Carver, left: Worker, right: Worker, index: int, nbytes: int) -> bool:
    """Let two workers produce the same sample and compare them."""
    ours = carver.carve_or_none(nbytes)  # leak: the return for a missing second region
    theirs = carver.carve_or_none(nbytes)  # clean: near miss, when only the first one is missing this is mended before the return
    if ours is None or theirs is None:
        if ours is None and theirs is not None:
            carver.mend(theirs)
        return False
    try:
        n, m = left.ask(index, ours), right.ask(index, theirs)
        return n == m and bool(np.array_equal(carver.view(ours)[:n], carver.view(theirs)[:m]))
    finally:
        carver.mend(ours)
        carver.mend(theirs)


def log_tail(carver: Carver, lines: Iterator[bytes], keep: int) -> bytes:
    buffer = GrowingBuffer(carver)  # clean: closed in the finally
    try:
        for line in lines:
            buffer.append(line)
        return bytes(carver.view(buffer._region)[max(0, buffer.length - keep):buffer.length])
    finally:
        buffer.close()
