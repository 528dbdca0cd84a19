from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Callable, Iterator

import numpy as np
import torch

log = logging.getLogger("shm_loader")


@dataclass
class Slab:
    seg: shared_memory.SharedMemory
    used: int = 0

    @property
    def capacity(self) -> int:
        return self.seg.size

    def put(self, raw: bytes) -> bool:
        if self.used + len(raw) > self.capacity:
            return False
        self.seg.buf[self.used : self.used + len(raw)] = raw
        self.used += len(raw)
        return True


class SlabPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._q: queue.Queue[Slab] = queue.Queue()
        for _ in range(count):
            self._q.put(Slab(shared_memory.SharedMemory(create=True, size=nbytes)))  # clean: owned by the pool, unlinked in destroy

    def checkout(self, timeout: float | None = None) -> Slab | None:
        try:
            slab = self._q.get(timeout=timeout)  # clean: near miss, the except means nothing came out
        except queue.Empty:
            return None
        slab.used = 0
        return slab

    def checkin(self, slab: Slab) -> None:
        self._q.put(slab)

    def checkout_sized(self, nbytes: int) -> Slab | None:
        for _ in range(self._q.qsize()):
            slab = self._q.get()  # clean: near miss, the small ones go back to the tail before the next turn
            if slab.capacity >= nbytes:
                slab.used = 0
                return slab
            self._q.put(slab)
        return None

    def destroy(self) -> None:
        while not self._q.empty():
            slab = self._q.get()  # clean: near miss, taken out for good, the segment is closed and unlinked
            slab.seg.close()
            slab.seg.unlink()

    def steal_fullest(self) -> Slab | None:
        best: Slab | None = None
        for _ in range(self._q.qsize()):
            slab = self._q.get()  # leak: a best that is beaten later is neither kept nor put back
            if best is None or slab.used > best.used:
                best = slab
            else:
                self._q.put(slab)
        return best


Sample = tuple[int, bytes]


class Packer(threading.Thread):
    def __init__(self, pool: SlabPool, source: Iterator[Sample], out: "queue.Queue[Slab | None]") -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.source = source
        self.out = out
        self.stop = threading.Event()

    def run(self) -> None:
        slab = self.pool.checkout()  # clean: near miss, replaced only after it went out; the last is sent or checked in
        if slab is None:
            self.out.put(None)
            return
        for _, raw in self.source:
            if self.stop.is_set():
                break
            if slab.put(raw):
                continue
            self.out.put(slab)
            slab = self.pool.checkout()  # clean: near miss, overwrites a slab already handed to the queue
            if slab is None:
                break
            slab.put(raw)
        if slab is not None:
            if slab.used:
                self.out.put(slab)
            else:
                self.pool.checkin(slab)
        self.out.put(None)


class BatchReader:
    def __init__(self, pool: SlabPool, ready: "queue.Queue[Slab | None]", width: int) -> None:
        self.pool = pool
        self.ready = ready
        self.width = width

    def _tensor(self, slab: Slab) -> torch.Tensor:
        arr = np.frombuffer(slab.seg.buf, dtype=np.uint8, count=slab.used)
        return torch.from_numpy(arr.copy()).view(-1, self.width)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            slab = self.ready.get()  # leak: a ragged slab is skipped by the continue and never checked in
            if slab is None:
                return
            if slab.used % self.width:
                log.warning("ragged slab of %d bytes", slab.used)
                continue
            batch = self._tensor(slab)
            self.pool.checkin(slab)
            yield batch

    def drain(self) -> int:
        n = 0
        while True:
            try:
                slab = self.ready.get_nowait()  # clean: near miss, both the None marker and the slabs are dealt with
            except queue.Empty:
                return n
            if slab is None:
                continue
            self.pool.checkin(slab)
            n += 1


def transcode(pool: SlabPool, src: Slab, fn: Callable[[bytes], bytes]) -> Slab | None:
    dst = pool.checkout(timeout=1.0)  # leak: a failed decode returns None and leaves dst outside the pool
    if dst is None:
        return None
    try:
        data = fn(bytes(src.seg.buf[: src.used]))
    except ValueError:
        log.exception("transcode")
        return None
    if not dst.put(data):
        pool.checkin(dst)
        return None
    return dst


def transcode_all(pool: SlabPool, slabs: list[Slab], fn: Callable[[bytes], bytes]) -> list[Slab]:
    done: list[Slab] = []
    for src in slabs:
        dst = transcode(pool, src, fn)  # clean: near miss, src goes back in any case and dst joins the result
        pool.checkin(src)
        if dst is None:
            continue
        done.append(dst)
    return done


def concat(pool: SlabPool, parts: list[Slab]) -> Slab | None:
    total = sum(p.used for p in parts)
    dst = pool.checkout_sized(total)  # clean: near miss, returned to the caller after the copy
    if dst is None:
        return None
    for part in parts:
        dst.put(bytes(part.seg.buf[: part.used]))
        pool.checkin(part)
    return dst


def checksum_stream(pool: SlabPool, source: Iterator[bytes]) -> int:
    slab = pool.checkout()  # leak: returned only when the stream fits, an overflow returns straight away
    if slab is None:
        return 0
    acc = 0
    for raw in source:
        if not slab.put(raw):
            return -1
        acc = (acc * 31 + sum(raw)) & 0xFFFFFFFF
    pool.checkin(slab)
    return acc
