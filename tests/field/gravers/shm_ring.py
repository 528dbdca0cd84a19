"""Shared-memory message ring from the scheduler to the tensor-parallel workers."""
from __future__ import annotations

import pickle
import struct
import time
from dataclasses import dataclass
from typing import Any, Iterator

HEADER = struct.Struct("<IIQ")


@dataclass
class Cell:
    index: int
    view: memoryview
    readers_left: int = 0
    size: int = 0
    pending_write: bool = False


class MessageRing:
    """Writers claim a cell and publish or revoke it. Readers open a cell and must ack it."""

    def __init__(self, cells: int, cell_bytes: int, readers: int):
        self._memory = bytearray(cells * cell_bytes)
        whole = memoryview(self._memory)
        self.cells = [Cell(i, whole[i * cell_bytes:(i + 1) * cell_bytes]) for i in range(cells)]
        self.cell_bytes = cell_bytes
        self.readers = readers
        self.head = 0
        self.cursor = [0] * readers

    # writer half

    def claim_cell(self) -> Cell | None:
        cell = self.cells[self.head % len(self.cells)]
        if cell.readers_left or cell.pending_write:
            return None
        cell.pending_write = True
        return cell

    def publish(self, cell: Cell, size: int) -> None:
        cell.size = size
        cell.readers_left = self.readers
        cell.pending_write = False
        self.head += 1

    def revoke(self, cell: Cell) -> None:
        cell.pending_write = False

    # reader half

    def open_cell(self, reader: int) -> Cell | None:
        at = self.cursor[reader]
        if at >= self.head:
            return None
        self.cursor[reader] = at + 1
        return self.cells[at % len(self.cells)]

    def ack(self, cell: Cell) -> None:
        cell.readers_left -= 1


class RingWriter:
    def __init__(self, ring: MessageRing):
        self.ring = ring
        self.seq = 0
        self.oversize = 0
        self.draft: Cell | None = None

    def _wait_cell(self, timeout: float) -> Cell | None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            cell = self.ring.claim_cell()  # clean: near miss, loops only on None
            if cell is not None:
                return cell
            time.sleep(0)
        return None

    def send(self, message: Any) -> bool:
        payload = pickle.dumps(message)
        cell = self._wait_cell(1.0)  # leak: the oversize branch neither publishes nor revokes
        if cell is None:
            return False
        if HEADER.size + len(payload) > self.ring.cell_bytes:
            self.oversize += 1
            return False
        HEADER.pack_into(cell.view, 0, self.seq, len(payload), time.monotonic_ns())
        cell.view[HEADER.size:HEADER.size + len(payload)] = payload
        self.seq += 1
        self.ring.publish(cell, HEADER.size + len(payload))
        return True

    def send_bytes(self, payload: bytes) -> bool:
        cell = self._wait_cell(1.0)  # clean: published, or revoked when oversize
        if cell is None:
            return False
        if HEADER.size + len(payload) > self.ring.cell_bytes:
            self.ring.revoke(cell)
            self.oversize += 1
            return False
        HEADER.pack_into(cell.view, 0, self.seq, len(payload), time.monotonic_ns())
        cell.view[HEADER.size:HEADER.size + len(payload)] = payload
        self.seq += 1
        self.ring.publish(cell, HEADER.size + len(payload))
        return True

    def begin_draft(self) -> bool:
        if self.draft is None:
            self.draft = self.ring.claim_cell()  # clean: near miss, end_draft publishes or revokes it
        return self.draft is not None

    def end_draft(self, size: int) -> None:
        cell, self.draft = self.draft, None
        if cell is None:
            return
        if size == 0:
            self.ring.revoke(cell)
        else:
            self.ring.publish(cell, size)

    def is_full(self) -> bool:
        return self.ring.claim_cell() is None  # leak: a probe of a free cell leaves it claimed


class RingReader:
    def __init__(self, ring: MessageRing, rank: int):
        self.ring = ring
        self.rank = rank
        self.expected = 0
        self.stale = 0
        self.kept: list[Cell] = []

    def receive(self) -> Any | None:
        cell = self.ring.open_cell(self.rank)  # clean: acked once the payload is copied
        if cell is None:
            return None
        seq, length, _ = HEADER.unpack_from(cell.view, 0)
        payload = bytes(cell.view[HEADER.size:HEADER.size + length])
        self.ring.ack(cell)
        self.expected = seq + 1
        return pickle.loads(payload)

    def receive_fresh(self, max_age_ns: int) -> Any | None:
        while True:
            cell = self.ring.open_cell(self.rank)  # leak: a stale cell is skipped by continue without ack
            if cell is None:
                return None
            seq, length, stamp = HEADER.unpack_from(cell.view, 0)
            if time.monotonic_ns() - stamp > max_age_ns:
                self.stale += 1
                continue
            payload = bytes(cell.view[HEADER.size:HEADER.size + length])
            self.ring.ack(cell)
            self.expected = seq + 1
            return pickle.loads(payload)

    def messages(self) -> Iterator[Any]:
        while (cell := self.ring.open_cell(self.rank)) is not None:  # clean: acked before the yield
            _, length, _ = HEADER.unpack_from(cell.view, 0)
            payload = bytes(cell.view[HEADER.size:HEADER.size + length])
            self.ring.ack(cell)
            yield pickle.loads(payload)

    def views(self) -> Iterator[memoryview]:
        """Zero-copy messages. Each view is valid until the next one is asked for."""
        while (cell := self.ring.open_cell(self.rank)) is not None:  # leak: an empty message ends it unacked
            if cell.size <= HEADER.size:
                return
            yield cell.view[HEADER.size:cell.size]
            self.ring.ack(cell)

    def keep(self, limit: int) -> int:
        while len(self.kept) < limit:
            cell = self.ring.open_cell(self.rank)  # clean: near miss, kept cells are acked by let_go
            if cell is None:
                break
            self.kept.append(cell)
        return len(self.kept)

    def let_go(self) -> None:
        for cell in self.kept:
            self.ring.ack(cell)
        self.kept.clear()

    def skip(self, count: int) -> int:
        last = None
        for _ in range(count):
            last = self.ring.open_cell(self.rank)  # leak: each cell but the last one is overwritten unacked
            if last is None:
                return 0
        if last is not None:
            self.ring.ack(last)
        return self.ring.cursor[self.rank]
