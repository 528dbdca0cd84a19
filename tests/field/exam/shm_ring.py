import os
import threading
from typing import Optional, Tuple


class RingFull(Exception):
    pass


class Ring:
    """Fixed-size cells. A cell is claimed, written, committed; the reader takes it and gives the cell back."""

    def __init__(self, cells: int, cell_bytes: int):
        self.cells = cells
        self.cell_bytes = cell_bytes
        self.mem = bytearray(cells * cell_bytes)
        self.free = list(range(cells))
        self.full: list = []
        self.cond = threading.Condition()

    def claim(self, block: bool = True) -> int:
        with self.cond:  # clean: with statement
            while not self.free:
                if not block:
                    raise RingFull()
                self.cond.wait()
            return self.free.pop(0)  # clean: goes to the caller

    def unclaim(self, cell: int) -> None:
        with self.cond:  # clean: with statement
            self.free.append(cell)
            self.cond.notify()

    def commit(self, cell: int, n: int) -> None:
        """The ring owns the cell again; a reader unclaims it."""
        with self.cond:  # clean: with statement
            self.full.append((cell, n))
            self.cond.notify()

    def take(self) -> Optional[Tuple[int, int]]:
        with self.cond:  # clean: with statement
            return self.full.pop(0) if self.full else None  # clean: the reader unclaims it

    def slot(self, cell: int) -> memoryview:
        off = cell * self.cell_bytes
        return memoryview(self.mem)[off:off + self.cell_bytes]


class Writer:
    def __init__(self, ring: Ring):
        self.ring = ring
        self.open_cell: Optional[int] = None
        self.fill = 0

    def send(self, payload: bytes) -> bool:
        cell = self.ring.claim()  # leak: an oversized payload returns False with the cell
        if len(payload) > self.ring.cell_bytes:
            return False
        self.ring.slot(cell)[:len(payload)] = payload
        self.ring.commit(cell, len(payload))
        return True

    def send_checked(self, payload: bytes) -> bool:
        cell = self.ring.claim()  # clean: near miss, unclaimed when it does not fit, else committed
        ok = len(payload) <= self.ring.cell_bytes
        if ok:
            self.ring.slot(cell)[:len(payload)] = payload
            self.ring.commit(cell, len(payload))
        else:
            self.ring.unclaim(cell)
        return ok

    def try_send(self, payload: bytes) -> bool:
        try:
            cell = self.ring.claim(block=False)  # clean: near miss, nothing is held when it raises
        except RingFull:
            return False
        self.ring.slot(cell)[:len(payload)] = payload
        self.ring.commit(cell, len(payload))
        return True

    def write(self, piece: bytes) -> None:
        if self.open_cell is None:
            self.open_cell = self.ring.claim()  # clean: near miss, guarded by None, flush commits it
            self.fill = 0
        self.ring.slot(self.open_cell)[self.fill:self.fill + len(piece)] = piece
        self.fill += len(piece)
        if self.fill >= self.ring.cell_bytes // 2:
            self.flush()

    def flush(self) -> None:
        if self.open_cell is not None:
            self.ring.commit(self.open_cell, self.fill)
            self.open_cell = None

    def send_pair(self, a: bytes, b: bytes) -> bool:
        ca = self.ring.claim()  # leak: RingFull for the second cell is swallowed without unclaim
        try:
            cb = self.ring.claim(block=False)  # clean: committed below
        except RingFull:
            return False
        self.ring.slot(ca)[:len(a)] = a
        self.ring.slot(cb)[:len(b)] = b
        self.ring.commit(ca, len(a))
        self.ring.commit(cb, len(b))
        return True


class Reader:
    def __init__(self, ring: Ring):
        self.ring = ring

    def recv(self) -> Optional[bytes]:
        item = self.ring.take()  # leak: a zero-length message returns b"" without unclaim
        if item is None:
            return None
        cell, n = item
        if n == 0:
            return b""
        data = bytes(self.ring.slot(cell)[:n])
        self.ring.unclaim(cell)
        return data

    def recv_all(self) -> list:
        out = []
        while (item := self.ring.take()) is not None:  # clean: each cell is unclaimed in the body
            cell, n = item
            out.append(bytes(self.ring.slot(cell)[:n]))
            self.ring.unclaim(cell)
        return out

    def skip(self, k: int) -> int:
        done = 0
        while done < k and self.ring.take():  # leak: the cell is discarded with the truth test
            done += 1
        return done


def dump_cell(ring: Ring, path: str) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)  # leak: nothing to take means return 0 with the descriptor open
    item = ring.take()  # clean: unclaimed after the write
    if item is None:
        return 0
    cell, n = item
    written = os.write(fd, ring.slot(cell)[:n])
    ring.unclaim(cell)
    os.close(fd)
    return written


def load_cell(ring: Ring, path: str) -> bool:
    cell = ring.claim()  # clean: committed at the end
    fd = os.open(path, os.O_RDONLY)  # clean: closed at once
    data = os.read(fd, ring.cell_bytes)
    os.close(fd)
    ring.slot(cell)[:len(data)] = data
    ring.commit(cell, len(data))
    return bool(data)
