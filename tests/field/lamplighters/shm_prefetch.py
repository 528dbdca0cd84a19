"""Shared-memory ring for the multi-process data loader.

Decoder processes write samples into slots of one mapping, the trainer reads
them without a copy.  A slot number is all that crosses the process boundary.

    ring = SlotRing(slots=64, nbytes=1 << 20)
    for batch in Prefetcher(ring, source, decode).batches(32):
        ...
"""
from __future__ import annotations

import logging
import mmap
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager

import numpy as np

log = logging.getLogger(__name__)

Sample = dict[str, np.ndarray]


class RingClosed(RuntimeError):
    pass


class DecodeError(ValueError):
    pass


class SlotRing:
    def __init__(self, slots: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, slots * nbytes)
        self._vacant: "queue.Queue[int]" = queue.Queue()
        self._closed = threading.Event()
        for slot in range(slots):
            self._vacant.put(slot)

    def occupy(self, timeout: float = 1.0) -> int:
        while not self._closed.is_set():
            try:
                return self._vacant.get(timeout=timeout)  # clean: returned to the caller
            except queue.Empty:
                log.debug("ring is full")
        raise RingClosed()

    def occupy_soon(self, timeout: float = 0.0) -> int | None:
        """One attempt; a closed ring gives nothing."""
        try:
            slot = self._vacant.get(timeout=max(timeout, 1e-3))  # leak: the closed check comes after the slot left the queue
        except queue.Empty:
            return None
        if self._closed.is_set():
            return None
        return slot

    def occupy_pair(self) -> tuple[int, int] | None:
        first = second = None
        try:
            first = self._vacant.get_nowait()  # clean: put back by the handler if there is no second
            second = self._vacant.get_nowait()  # clean: the pair is returned
        except queue.Empty:
            if first is not None:
                self._vacant.put(first)
            return None
        return first, second

    def vacate(self, slot: int) -> None:
        self._vacant.put(slot)

    def view(self, slot: int, count: int, dtype: str = "uint8") -> np.ndarray:
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=slot * self.nbytes)

    def close(self) -> None:
        self._closed.set()

    @contextmanager
    def slot(self) -> Iterator[int]:
        s = self.occupy()  # clean: vacated in the finally
        try:
            yield s
        finally:
            self.vacate(s)


def write_sample(ring: SlotRing, slot: int, raw: bytes) -> int:
    if len(raw) > ring.nbytes:
        raise DecodeError(f"{len(raw)} bytes do not fit in a slot")
    start = slot * ring.nbytes
    ring._map[start : start + len(raw)] = raw
    return len(raw)


class Prefetcher:
    def __init__(
        self,
        ring: SlotRing,
        source: Iterable[bytes],
        keep: Callable[[bytes], bool] = bool,
        depth: int = 16,
    ) -> None:
        self.ring = ring
        self.source = source
        self.keep = keep
        self._filled: "queue.Queue[tuple[int, int] | None]" = queue.Queue(depth)
        self._stop = threading.Event()
        self.dropped = 0

    # -- producer ---------------------------------------------------------
    def produce(self) -> None:
        for raw in self.source:
            slot = self.ring.occupy()  # leak: the continue for a filtered sample passes over vacate
            if not self.keep(raw):
                self.dropped += 1
                continue
            try:
                n = write_sample(self.ring, slot, raw)
            except DecodeError as exc:
                log.warning("%s", exc)
                self.ring.vacate(slot)
                continue
            self._filled.put((slot, n))
        self._filled.put(None)

    def produce_bounded(self) -> None:
        """Like :meth:`produce`, but gives up when the trainer has stopped."""
        for raw in self.source:
            if not self.keep(raw):
                self.dropped += 1
                continue
            slot = self.ring.occupy()  # clean: queued, or vacated when it could not be written or queued
            try:
                n = write_sample(self.ring, slot, raw)
                queued = self._offer(slot, n)
            except DecodeError:
                queued = False
            if not queued:
                self.ring.vacate(slot)
            if self._stop.is_set():
                break

    def _offer(self, slot: int, n: int) -> bool:
        while not self._stop.is_set():
            try:
                self._filled.put((slot, n), timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def produce_lossy(self) -> None:
        """Never blocks the decoder; samples are dropped under pressure."""
        for raw in self.source:
            slot = self.ring.occupy_soon()  # leak: a full queue is counted as a drop and the slot is not vacated
            if slot is None:
                self.dropped += 1
                continue
            n = min(len(raw), self.ring.nbytes)
            write_sample(self.ring, slot, raw[:n])
            try:
                self._filled.put_nowait((slot, n))
            except queue.Full:
                self.dropped += 1

    # -- consumer ------------------------------------------------------------
    def samples(self) -> Generator[np.ndarray, None, None]:
        """Views into the ring, each valid until the next one is asked for."""
        while True:
            item = self._filled.get()
            if item is None:
                return
            slot, n = item
            try:
                yield self.ring.view(slot, n)
            finally:
                self.ring.vacate(slot)

    def copies(self) -> Generator[np.ndarray, None, None]:
        for view in self.samples():
            yield view.copy()

    def batches(self, size: int) -> Generator[list[np.ndarray], None, None]:
        """Zero-copy batches; the slots are vacated when the next batch starts."""
        held: list[int] = []
        views: list[np.ndarray] = []
        try:
            while (item := self._filled.get()) is not None:
                held.append(item[0])
                views.append(self.ring.view(*item))
                if len(held) == size:
                    yield views
                    views = self._recycle(held)
            if views:
                yield views
        finally:
            self._recycle(held)

    def _recycle(self, held: list[int]) -> list[np.ndarray]:
        while held:
            self.ring.vacate(held.pop())
        return []

    def stop(self) -> None:
        self._stop.set()
        while True:
            try:
                item = self._filled.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                self.ring.vacate(item[0])


def chunked(ring: SlotRing, raw: bytes) -> Generator[np.ndarray, None, None]:
    """Stream one large record through a single slot."""
    slot = ring.occupy()  # leak: a consumer that breaks off the generator never gets it to the vacate
    for start in range(0, len(raw), ring.nbytes):
        n = write_sample(ring, slot, raw[start : start + ring.nbytes])
        yield ring.view(slot, n)
    ring.vacate(slot)


def first_line(ring: SlotRing, raw: bytes) -> bytes:
    out = b""
    for part in chunked(ring, raw):
        head, sep, _ = part.tobytes().partition(b"\n")
        out += head
        if sep:
            break
    return out


def chunked_safe(ring: SlotRing, raw: bytes) -> Generator[np.ndarray, None, None]:
    with ring.slot() as slot:  # clean: GeneratorExit leaves the with as any exception does
        for start in range(0, len(raw), ring.nbytes):
            n = write_sample(ring, slot, raw[start : start + ring.nbytes])
            yield ring.view(slot, n)


def count_lines(ring: SlotRing, raw: bytes, limit: int) -> int:
    lines = 0
    with closing(chunked_safe(ring, raw)) as parts:
        for part in parts:
            lines += int((part == 10).sum())
            if lines >= limit:
                break
    return lines


def delta_encode(ring: SlotRing, old: bytes, new: bytes) -> np.ndarray | None:
    pair = ring.occupy_pair()  # leak: an oversized record makes write_sample raise before the try
    if pair is None:
        return None
    a, b = pair
    n = write_sample(ring, a, old)
    m = write_sample(ring, b, new)
    try:
        k = min(n, m)
        return ring.view(a, k) ^ ring.view(b, k)
    finally:
        ring.vacate(a)
        ring.vacate(b)
