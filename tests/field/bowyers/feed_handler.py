"""Market-data feed handler that fills the ring buffers of the online feature builder."""
from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Iterator, Optional

log = logging.getLogger(__name__)

WIRE = struct.Struct("<IHHQdd")
HEARTBEAT, QUOTE, TRADE, GAP = 0, 1, 2, 3


@dataclass
class Slot:
    index: int
    buf: bytearray
    length: int = 0
    seq: int = 0
    shared: int = 0


class SlotRing:
    """Preallocated packet slots.  A slot taken with reserve() ends in recycle()."""

    def __init__(self, count: int, size: int = 2048) -> None:
        self._free: deque[Slot] = deque(Slot(i, bytearray(size)) for i in range(count))
        self._mu = threading.Lock()
        self.starved = 0

    def reserve(self) -> Optional[Slot]:
        with self._mu:
            if not self._free:
                self.starved += 1
                return None
            return self._free.popleft()

    def recycle(self, slot: Slot) -> None:
        slot.length = 0
        with self._mu:
            self._free.append(slot)

    def free_count(self) -> int:
        return len(self._free)


def recv_slot(ring: SlotRing, sock: socket.socket) -> Optional[Slot]:
    """One datagram in a slot that the caller must recycle."""
    slot = ring.reserve()  # clean: recycled for an empty datagram, else handed to the caller
    if slot is None:
        return None
    slot.length = sock.recv_into(slot.buf)
    if slot.length == 0:
        ring.recycle(slot)
        return None
    slot.seq = WIRE.unpack_from(slot.buf)[0]
    return slot


def recv_quote(ring: SlotRing, sock: socket.socket) -> Optional[Slot]:
    slot = recv_slot(ring, sock)  # leak: a packet that is no quote is dropped with its slot
    if slot is None or WIRE.unpack_from(slot.buf)[1] != QUOTE:
        return None
    return slot


def recv_trade(ring: SlotRing, sock: socket.socket) -> Optional[Slot]:
    slot = recv_slot(ring, sock)  # clean: recycled when it is no trade, else handed to the caller
    if slot is None:
        return None
    if WIRE.unpack_from(slot.buf)[1] == TRADE:
        return slot
    ring.recycle(slot)
    return None


class Book:
    def __init__(self, symbol: int) -> None:
        self.symbol = symbol
        self.bid = 0.0
        self.ask = 0.0
        self.trades = 0

    def apply(self, kind: int, a: float, b: float) -> None:
        if kind == QUOTE:
            self.bid, self.ask = a, b
        elif kind == TRADE:
            self.trades += 1


class FeedHandler:
    """Single reader: takes packets off the socket, restores their order, updates the books."""

    def __init__(self, ring: SlotRing, sock: socket.socket) -> None:
        self.ring = ring
        self.sock = sock
        self.books: dict[int, Book] = {}
        self.expected = 1
        self.duplicates = 0
        self._early: dict[int, Slot] = {}

    def poll(self) -> bool:
        slot = recv_slot(self.ring, self.sock)  # leak: a duplicate packet returns without recycle
        if slot is None:
            return False
        if slot.seq < self.expected:
            self.duplicates += 1
            return True
        if slot.seq > self.expected:
            self._park(slot)
            return True
        self._consume(slot)
        self._unpark()
        return True

    def poll_unordered(self) -> bool:
        slot = recv_slot(self.ring, self.sock)  # clean: near miss, _consume recycles the slot
        if slot is None:
            return False
        self._consume(slot)
        return True

    def _park(self, slot: Slot) -> None:
        if slot.seq in self._early:
            self.ring.recycle(slot)
        else:
            self._early[slot.seq] = slot

    def _unpark(self) -> None:
        while self.expected in self._early:
            self._consume(self._early.pop(self.expected))

    def _consume(self, slot: Slot) -> None:
        seq, kind, symbol, _, a, b = WIRE.unpack_from(slot.buf)
        if kind != HEARTBEAT:
            self.books.setdefault(symbol, Book(symbol)).apply(kind, a, b)
        self.expected = seq + 1
        self.ring.recycle(slot)

    def resync(self, seq: int) -> None:
        self.expected = seq
        for early in [s for s in self._early if s < seq]:
            self.ring.recycle(self._early.pop(early))

    def close(self) -> None:
        for slot in self._early.values():
            self.ring.recycle(slot)
        self._early.clear()
        self.sock.close()


class ConflatedQueue:
    """Keeps the newest packet of each symbol for a slow reader."""

    def __init__(self, ring: SlotRing, sock: socket.socket) -> None:
        self._ring = ring
        self._sock = sock
        self._newest: dict[int, Slot] = {}
        self._order: deque[int] = deque()

    def fill(self, packets: int) -> int:
        stored = 0
        for _ in range(packets):
            slot = recv_slot(self._ring, self._sock)  # leak: the older packet of a symbol is overwritten
            if slot is None:
                break
            symbol = WIRE.unpack_from(slot.buf)[2]
            if symbol not in self._newest:
                self._order.append(symbol)
            self._newest[symbol] = slot
            stored += 1
        return stored

    def take(self) -> Optional[bytes]:
        if not self._order:
            return None
        slot = self._newest.pop(self._order.popleft())
        data = bytes(slot.buf[:slot.length])
        self._ring.recycle(slot)
        return data


class MergedQueue:
    """Like ConflatedQueue, for the replay tool."""

    def __init__(self, ring: SlotRing, sock: socket.socket) -> None:
        self._ring = ring
        self._sock = sock
        self._newest: dict[int, Slot] = {}

    def fill(self, packets: int) -> None:
        for _ in range(packets):
            slot = recv_slot(self._ring, self._sock)  # clean: near miss, displaced one recycled, rest drained
            if slot is None:
                break
            symbol = WIRE.unpack_from(slot.buf)[2]
            before = self._newest.pop(symbol, None)
            if before is not None:
                self._ring.recycle(before)
            self._newest[symbol] = slot

    def drain(self, sink: Callable[[int, bytes], None]) -> int:
        n = 0
        while self._newest:
            symbol, slot = self._newest.popitem()
            sink(symbol, bytes(slot.buf[:slot.length]))
            self._ring.recycle(slot)
            n += 1
        return n


class FanOut:
    """One packet for several consumers; the last one that is done recycles it."""

    def __init__(self, ring: SlotRing) -> None:
        self._ring = ring
        self._mu = threading.Lock()
        self.consumers: list[Callable[[Slot, Callable[[], None]], None]] = []

    def dispatch(self, sock: socket.socket) -> bool:
        slot = recv_slot(self._ring, sock)  # clean: near miss, recycled by the last done(), or at once
        if slot is None:
            return False
        if not self.consumers:
            self._ring.recycle(slot)
            return True
        slot.shared = len(self.consumers)

        def done() -> None:
            with self._mu:
                slot.shared -= 1
                last = slot.shared == 0
            if last:
                self._ring.recycle(slot)

        for consumer in list(self.consumers):
            consumer(slot, done)
        return True


def capture(ring: SlotRing, sock: socket.socket, path: str, packets: int) -> int:
    written = 0
    with open(path, "wb") as out:  # clean: file closed by the with
        while written < packets:
            slot = recv_slot(ring, sock)  # clean: recycled each turn
            if slot is None:
                continue
            out.write(slot.buf[:slot.length])
            ring.recycle(slot)
            written += 1
    return written


def replay(ring: SlotRing, path: str) -> Iterator[Slot]:
    """Slots from a capture file; each slot belongs to whoever receives it."""
    src = open(path, "rb")  # leak: the return at a short record leaves the file open
    while True:
        head = src.read(WIRE.size)
        if len(head) < WIRE.size:
            log.info("capture %s ends", path)
            return
        slot = ring.reserve()  # clean: handed to the receiver of the yield
        if slot is None:
            continue
        slot.buf[:WIRE.size] = head
        slot.length = WIRE.size
        yield slot


def replay_books(ring: SlotRing, path: str) -> dict[int, Book]:
    books: dict[int, Book] = {}
    for slot in replay(ring, path):  # clean: each received slot is recycled in the loop
        _, kind, symbol, _, a, b = WIRE.unpack_from(slot.buf)
        books.setdefault(symbol, Book(symbol)).apply(kind, a, b)
        ring.recycle(slot)
    return books


def gap_positions(ring: SlotRing, path: str) -> list[int]:
    gaps: list[int] = []
    for slot in replay(ring, path):  # leak: slots of gap records are recycled, all the others are not
        seq, kind = WIRE.unpack_from(slot.buf)[:2]
        if kind == GAP:
            gaps.append(seq)
            ring.recycle(slot)
    return gaps
