"""Shared-memory data loader: fixed slots, producer threads, generator front ends."""
from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Optional

log = logging.getLogger("shm_loader")


class SlotRing:
    def __init__(self, n: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.buf = memoryview(bytearray(n * slot_bytes))
        self._q: "queue.Queue[int]" = queue.Queue()
        for i in range(n):
            self._q.put(i)

    def claim(self, block: bool = True, timeout: Optional[float] = None) -> int:
        """Slot number, or -1."""
        try:
            return self._q.get(block, timeout)
        except queue.Empty:
            return -1

    def unclaim(self, slot: int) -> None:
        self._q.put(slot)

    def at(self, slot: int) -> memoryview:
        o = slot * self.slot_bytes
        return self.buf[o:o + self.slot_bytes]

    def avail(self) -> int:
        return self._q.qsize()

    @contextlib.contextmanager
    def slot(self) -> Iterator[memoryview]:
        s = self.claim()  # clean: the context manager's finally gives it back
        try:
            yield self.at(s)
        finally:
            self.unclaim(s)


@dataclass
class Batch:
    slot: int
    size: int
    epoch: int = 0


Sample = bytes
Decode = Callable[[Sample], Optional[bytes]]


def produce(ring: SlotRing, src: Iterable[Sample], decode: Decode, out: "queue.Queue[Any]") -> None:
    for sample in src:
        slot = ring.claim()  # leak: an undecodable sample continues with the slot
        data = decode(sample)
        if data is None:
            log.warning("skip bad sample")
            continue
        ring.at(slot)[:len(data)] = data
        out.put(Batch(slot, len(data)))
    out.put(None)


def produce_checked(ring: SlotRing, src: Iterable[Sample], decode: Decode,
                    out: "queue.Queue[Any]", stop: threading.Event) -> None:
    it = iter(src)
    slot = -1
    while not stop.is_set():
        if slot < 0:
            slot = ring.claim(timeout=0.1)  # clean: near miss, kept for the next sample after a bad one and given back at the end
            if slot < 0:
                continue
        sample = next(it, None)
        if sample is None:
            break
        data = decode(sample)
        if data is None:
            continue
        ring.at(slot)[:len(data)] = data
        out.put(Batch(slot, len(data)))
        slot = -1
    if slot >= 0:
        ring.unclaim(slot)
    out.put(None)


def consume(ring: SlotRing, q: "queue.Queue[Any]") -> Iterator[bytes]:
    while True:
        b = q.get()
        if b is None:
            return
        data = bytes(ring.at(b.slot)[:b.size])
        ring.unclaim(b.slot)
        yield data


def batches(ring: SlotRing, src: Iterable[Sample], per_batch: int) -> Iterator[bytes]:
    """Pack samples into slots; the view is valid until the next item."""
    slot = ring.claim()  # leak: the partial last batch is dropped with its slot
    n, off = 0, 0
    for s in src:
        ring.at(slot)[off:off + len(s)] = s
        off += len(s)
        n += 1
        if n == per_batch:
            yield bytes(ring.at(slot)[:off])
            ring.unclaim(slot)
            slot = ring.claim()  # leak: the partial last batch is dropped with its slot
            n, off = 0, 0


def views(ring: SlotRing, src: Iterable[Sample]) -> Iterator[memoryview]:
    slot = ring.claim()  # clean: one slot for the life of the generator, finally gives it back
    try:
        for s in src:
            v = ring.at(slot)
            v[:len(s)] = s
            yield v[:len(s)]
    finally:
        ring.unclaim(slot)


def head(ring: SlotRing, src: Iterable[Sample]) -> bytes:
    for v in views(ring, src):
        return bytes(v)
    return b""


class Shuffler:
    """Reservoir over slots."""

    def __init__(self, ring: SlotRing, cap: int, seed: int = 0) -> None:
        self.ring = ring
        self.cap = cap
        self.rng = random.Random(seed)
        self.pool: list[Batch] = []
        self.best: dict[str, int] = {}

    def offer(self, s: Sample) -> Optional[Batch]:
        slot = self.ring.claim()  # clean: goes into the reservoir, evicted ones are returned to the caller
        self.ring.at(slot)[:len(s)] = s
        b = Batch(slot, len(s))
        if len(self.pool) < self.cap:
            self.pool.append(b)
            return None
        i = self.rng.randrange(self.cap)
        out, self.pool[i] = self.pool[i], b
        return out

    def feed(self, src: Iterable[Sample]) -> Iterator[bytes]:
        for s in src:
            b = self.offer(s)  # clean: given back after the copy
            if b is not None:
                data = bytes(self.ring.at(b.slot)[:b.size])
                self.ring.unclaim(b.slot)
                yield data
        yield from self.drain()

    def prime(self, src: Iterable[Sample]) -> int:
        n = 0
        for s in src:
            self.offer(s)  # leak: an evicted batch is ignored
            n += 1
        return n

    def drain(self) -> Iterator[bytes]:
        while self.pool:
            b = self.pool.pop()
            data = bytes(self.ring.at(b.slot)[:b.size])
            self.ring.unclaim(b.slot)
            yield data

    def sample_pair(self, a: Sample, b: Sample) -> Optional[int]:
        """Contrastive pair in two slots."""
        sa = self.ring.claim(timeout=0.05)  # leak: not given back when the second claim times out
        if sa < 0:
            return None
        sb = self.ring.claim(timeout=0.05)  # clean: given back below
        if sb < 0:
            log.info("ring busy")
            return None
        self.ring.at(sa)[:len(a)] = a
        self.ring.at(sb)[:len(b)] = b
        dot = sum(x * y for x, y in zip(self.ring.at(sa), self.ring.at(sb)))
        self.ring.unclaim(sb)
        self.ring.unclaim(sa)
        return dot

    def keep_best(self, key: str, s: Sample) -> None:
        slot = self.ring.claim()  # clean: near miss, stored, or swapped out with the old one given back
        self.ring.at(slot)[:len(s)] = s
        prev = self.best.get(key)
        if prev is not None and self.ring.at(prev)[0] >= s[0]:
            self.ring.unclaim(slot)
            return
        self.best[key] = slot
        if prev is not None:
            self.ring.unclaim(prev)

    def forget(self) -> None:
        for slot in self.best.values():
            self.ring.unclaim(slot)
        self.best = {}


def collate(ring: SlotRing, samples: list[Sample]) -> bytes:
    with ring.slot() as v:  # clean: context manager
        off = 0
        for s in samples:
            v[off:off + len(s)] = s
            off += len(s)
        return bytes(v[:off])


if __name__ == "__main__":
    ring = SlotRing(6, 64)
    src = [bytes([i]) * 4 for i in range(1, 9)]
    q: "queue.Queue[Any]" = queue.Queue()
    t = threading.Thread(target=produce_checked, args=(ring, src, lambda s: s, q, threading.Event()))
    t.start()
    got = list(consume(ring, q))
    t.join()
    sh = Shuffler(ring, 3)
    got2 = list(sh.feed(src))
    sh.keep_best("a", b"\x01"); sh.keep_best("a", b"\x03"); sh.keep_best("a", b"\x02"); sh.forget()
    print(len(got), len(got2), collate(ring, src[:2]), sh.sample_pair(b"a", b"b"), head(ring, src), ring.avail())
