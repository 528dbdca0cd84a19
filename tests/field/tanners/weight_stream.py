"""Streams layer weights from disk over a ring of pinned staging slots into device slots.

Used when the model does not fit: the forward pass asks for layers in order and the
loader thread keeps a few ahead.
"""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO, Callable, Dict, Generator, Iterable, Iterator, List, Optional, Tuple


@dataclass
class Slot:
    index: int
    buf: bytearray
    fill: int = 0


class StagingRing:
    def __init__(self, n: int, nbytes: int) -> None:
        self._q: "queue.Queue[Slot]" = queue.Queue()
        for i in range(n):
            self._q.put(Slot(i, bytearray(nbytes)))

    def next_slot(self, timeout: Optional[float] = None) -> Slot:
        """Raises queue.Empty after ``timeout``."""
        return self._q.get(timeout=timeout)

    def recycle(self, slot: Slot) -> None:
        slot.fill = 0
        self._q.put(slot)

    def ready(self) -> int:
        return self._q.qsize()


def fill(slot: Slot, fh: BinaryIO) -> int:
    slot.fill = fh.readinto(slot.buf)
    return slot.fill


# ---- generators ------------------------------------------------------------
def raw_slots(ring: StagingRing, path: str) -> Iterator[Slot]:
    """Filled slots of one file, valid until the next iteration."""
    fh = open(path, "rb")  # clean: finally
    try:
        while True:
            slot = ring.next_slot()  # clean: near miss, break comes after recycle and finally covers the yield
            try:
                if fill(slot, fh) == 0:
                    break
                yield slot
            finally:
                ring.recycle(slot)
    finally:
        fh.close()


def owned_slots(ring: StagingRing, path: str) -> Iterator[Slot]:
    """Filled slots of one file; the consumer recycles them."""
    with open(path, "rb") as fh:  # clean: with
        while True:
            slot = ring.next_slot()  # leak: the empty slot at end of file is not recycled
            if fill(slot, fh) == 0:
                return
            yield slot


def lazy_slots(ring: StagingRing, path: str, skip: int) -> Iterator[bytes]:
    slot = ring.next_slot()  # leak: peek_header leaves the generator at its first yield, no finally
    with open(path, "rb") as fh:  # clean: with
        fh.seek(skip)
        while fill(slot, fh):
            yield bytes(slot.buf[: slot.fill])
    ring.recycle(slot)


def peek_header(ring: StagingRing, path: str) -> bytes:
    for piece in lazy_slots(ring, path, 0):
        return piece[:64]
    return b""


def tee(ring: StagingRing, path: str) -> Generator[Slot, Optional[bool], int]:
    """send(True) stops. The slot is lent for one step."""
    total = 0
    slot = ring.next_slot()  # clean: near miss, one finally around every way out
    try:
        with open(path, "rb") as fh:  # clean: with
            while fill(slot, fh):
                total += slot.fill
                if (yield slot):
                    return total
    finally:
        ring.recycle(slot)
    return total


def digest(ring: StagingRing, path: str) -> int:
    acc = 0
    for slot in owned_slots(ring, path):  # clean: each recycled after use
        acc = (acc * 31 + sum(slot.buf[: slot.fill])) & 0xFFFFFFFF
        ring.recycle(slot)
    return acc


def find(ring: StagingRing, path: str, needle: bytes) -> int:
    pos = 0
    for slot in owned_slots(ring, path):  # leak: the slot with the hit is not recycled before return
        i = bytes(slot.buf[: slot.fill]).find(needle)
        if i >= 0:
            return pos + i
        pos += slot.fill
        ring.recycle(slot)
    return -1


def find_first(ring: StagingRing, path: str, needle: bytes) -> int:
    pos = 0
    for slot in owned_slots(ring, path):  # clean: near miss, recycle stands before the test that returns
        i = bytes(slot.buf[: slot.fill]).find(needle)
        n = slot.fill
        ring.recycle(slot)
        if i >= 0:
            return pos + i
        pos += n
    return -1


# ---- the loader thread -------------------------------------------------------
class LayerLoader:
    def __init__(self, ring: StagingRing, paths: List[str], ahead: int = 2) -> None:
        self.ring = ring
        self.paths = paths
        self._ready: "queue.Queue[Optional[Tuple[int, Slot]]]" = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._parked: Dict[int, Slot] = {}

    def run(self) -> None:
        for i, path in enumerate(self.paths):
            slot = self.ring.next_slot()  # leak: stop set while waiting for the slot breaks with it in hand
            if self._stop.is_set():
                break
            with open(path, "rb") as fh:  # clean: with
                fill(slot, fh)
            self._ready.put((i, slot))
        self._ready.put(None)

    def run_polled(self) -> None:
        for i, path in enumerate(self.paths):
            slot: Optional[Slot] = None
            while slot is None and not self._stop.is_set():
                try:
                    slot = self.ring.next_slot(timeout=0.05)  # clean: near miss, rebinds only None, put or recycled below
                except queue.Empty:
                    continue
            if slot is None:
                break
            try:
                with open(path, "rb") as fh:  # clean: with
                    fill(slot, fh)
            except OSError:
                self.ring.recycle(slot)
                continue
            self._ready.put((i, slot))
        self._ready.put(None)

    def run_lenient(self, on_error: Callable[[str, Exception], None]) -> None:
        for i, path in enumerate(self.paths):
            slot = self.ring.next_slot()  # leak: a file that cannot be read is reported and its slot not recycled
            try:
                with open(path, "rb") as fh:  # clean: with
                    fill(slot, fh)
            except OSError as e:
                on_error(path, e)
            else:
                self._ready.put((i, slot))
        self._ready.put(None)

    def layers(self) -> Iterator[Tuple[int, bytes]]:
        while True:
            item = self._ready.get()
            if item is None:
                return
            i, slot = item
            data = bytes(slot.buf[: slot.fill])
            self.ring.recycle(slot)
            yield i, data

    def park(self, i: int, timeout: float = 1.0) -> bool:
        """Hold on to a layer that every step needs (embeddings, head)."""
        if i in self._parked:
            return True
        try:
            slot = self.ring.next_slot(timeout)  # clean: parked until unpark_all
        except queue.Empty:
            return False
        with open(self.paths[i], "rb") as fh:  # clean: with
            fill(slot, fh)
        self._parked[i] = slot
        return True

    def unpark_all(self) -> None:
        for slot in self._parked.values():
            self.ring.recycle(slot)
        self._parked.clear()

    def stop(self) -> None:
        self._stop.set()
        while not self._ready.empty():
            item = self._ready.get()
            if item is not None:
                self.ring.recycle(item[1])


def load_two(ring: StagingRing, a: str, b: str) -> Optional[Tuple[bytes, bytes]]:
    """Gate and up projections are fused, so both must be staged together."""
    first = ring.next_slot()  # clean: recycled in the handler and at the end
    try:
        second = ring.next_slot(timeout=0.2)  # clean: recycled at the end
    except queue.Empty:
        ring.recycle(first)
        return None
    out = []
    for slot, path in ((first, a), (second, b)):
        with open(path, "rb") as fh:  # clean: with
            fill(slot, fh)
        out.append(bytes(slot.buf[: slot.fill]))
        ring.recycle(slot)
    return out[0], out[1]
