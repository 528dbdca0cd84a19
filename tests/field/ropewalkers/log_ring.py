"""Log shipper: producers fill cells of a ring, a shipper thread sends them and sets the cells free."""
from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Iterable

log = logging.getLogger("shipper")

CELL = 4096


@dataclass(eq=False)
class Cell:
    index: int
    mem: memoryview
    used: int = 0


class Ring:
    """Cells over one block of memory."""

    def __init__(self, cells: int) -> None:
        block = memoryview(bytearray(cells * CELL))
        self._cells = [Cell(i, block[i * CELL : (i + 1) * CELL]) for i in range(cells)]
        self._spare = deque(self._cells)
        self._cv = threading.Condition()

    def grab(self, timeout: float | None = None) -> Cell | None:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._spare), timeout):
                return None
            cell = self._spare.popleft()
            cell.used = 0
            return cell

    def grab_many(self, n: int) -> list[Cell]:
        """n cells or none."""
        cells: list[Cell] = []
        while len(cells) < n:
            cell = self.grab(timeout=0.01)  # leak: a part of the cells is dropped for the empty list
            if cell is None:
                return []
            cells.append(cell)
        return cells

    def set_free(self, cell: Cell) -> None:
        with self._cv:
            self._spare.append(cell)
            self._cv.notify()


def put_line(cell: Cell, raw: bytes) -> bool:
    if cell.used + 4 + len(raw) > CELL:
        return False
    struct.pack_into(">I", cell.mem, cell.used, len(raw))
    cell.mem[cell.used + 4 : cell.used + 4 + len(raw)] = raw
    cell.used += 4 + len(raw)
    return True


class Producer:
    """Has one cell open at a time; full ones go to the shipper."""

    def __init__(self, ring: Ring, full: deque[Cell]) -> None:
        self.ring = ring
        self.full = full
        self.cell: Cell | None = None
        self.lost = 0

    def line(self, text: str) -> None:
        raw = text.encode()[: CELL - 4]
        if self.cell is None:
            self.cell = self.ring.grab(timeout=0.05)  # clean: goes to the shipper when full or at the end
            if self.cell is None:
                self.lost += 1
                return
        if put_line(self.cell, raw):
            return
        self.full.append(self.cell)
        self.cell = self.ring.grab(timeout=0.05)  # clean: near miss, the former one is with the shipper
        if self.cell is None:
            self.lost += 1
        else:
            put_line(self.cell, raw)

    def end(self) -> None:
        if self.cell is not None:
            self.full.append(self.cell)
            self.cell = None


class AuditProducer:
    """Audit lines must not be lost: each has a cell of its own until the server confirms its number."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.open: dict[int, Cell] = {}
        self.serial = 0

    def record(self, raw: bytes) -> int | None:
        cell = self.ring.grab(timeout=1.0)  # leak: confirm throws the entries away without freeing cells
        if cell is None:
            return None
        put_line(cell, raw[: CELL - 4])
        self.serial += 1
        self.open[self.serial] = cell
        return self.serial

    def unconfirmed(self) -> list[bytes]:
        return [bytes(c.mem[4 : c.used]) for c in self.open.values()]

    def confirm(self, upto: int) -> int:
        before = len(self.open)
        self.open = {n: c for n, c in self.open.items() if n > upto}
        return before - len(self.open)


class MetricProducer:
    """Same protocol for metric samples, one number at a time."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.open: dict[int, Cell] = {}

    def sample(self, number: int, values: Iterable[float]) -> bool:
        if number in self.open:
            return False
        cell = self.ring.grab(timeout=1.0)  # clean: near miss, confirm sets it free
        if cell is None:
            return False
        for v in values:
            if not put_line(cell, struct.pack(">d", v)):
                break
        self.open[number] = cell
        return True

    def confirm(self, upto: int) -> None:
        for number in sorted(self.open):
            if number > upto:
                break
            self.ring.set_free(self.open.pop(number))


class Shipper(threading.Thread):
    def __init__(self, ring: Ring, full: deque[Cell], send: Callable[[bytes], bool]) -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.full = full
        self.send = send
        self.wake = threading.Event()
        self.running = True

    def run(self) -> None:
        while self.running or self.full:
            if not self.full:
                self.wake.wait(0.2)
                self.wake.clear()
                continue
            cell = self.full.popleft()
            if not self.send(bytes(cell.mem[: cell.used])):
                log.warning("cell %d could not be sent", cell.index)
            self.ring.set_free(cell)

    def ship_now(self, text: str) -> bool:
        """Urgent line, past the queue."""
        cell = self.ring.grab(timeout=0.5)  # leak: set free only if the send went well
        if cell is None:
            return False
        put_line(cell, text.encode()[: CELL - 4])
        ok = self.send(bytes(cell.mem[: cell.used]))
        if ok:
            self.ring.set_free(cell)
        return ok

    def ship_bulk(self, raws: list[bytes]) -> int:
        cells = self.ring.grab_many(1 + sum(map(len, raws)) // CELL)  # leak: cells after the last line
        if not cells:
            return 0
        sent = 0
        pending = iter(cells)
        for raw in raws:
            cell = next(pending, None)
            if cell is None:
                break
            put_line(cell, raw[: CELL - 4])
            sent += self.send(bytes(cell.mem[: cell.used]))
            self.ring.set_free(cell)
        return sent

    def ship_pair(self, head: bytes, tail: bytes) -> bool:
        cells = self.ring.grab_many(2)  # clean: both set free after the sends
        if not cells:
            return False
        ok = True
        for cell, raw in zip(cells, (head, tail)):
            ok = put_line(cell, raw[: CELL - 4]) and self.send(bytes(cell.mem[: cell.used])) and ok
        for cell in cells:
            self.ring.set_free(cell)
        return ok
