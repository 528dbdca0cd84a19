"""Scratch buffers on a shelf. The borrower marks a buffer idle, the sweeper puts it back."""
from __future__ import annotations

import threading
from collections import deque


class Loan:
    __slots__ = ("data", "idle", "owner")

    def __init__(self, data: bytearray, owner: str) -> None:
        self.data = data
        self.owner = owner
        self.idle = False

    def mark_idle(self) -> None:
        self.idle = True


class Shelf:
    """sweep() runs every few seconds. What is not marked idle stays lent."""

    def __init__(self, count: int, size: int) -> None:
        self._stock: deque[bytearray] = deque(bytearray(size) for _ in range(count))
        self._lent: list[Loan] = []
        self._lock = threading.Lock()

    def lend(self, owner: str) -> Loan | None:
        with self._lock:
            if not self._stock:
                return None
            loan = Loan(self._stock.popleft(), owner)
            self._lent.append(loan)
            return loan

    def sweep(self) -> int:
        with self._lock:
            back = [loan for loan in self._lent if loan.idle]
            self._lent = [loan for loan in self._lent if not loan.idle]
            self._stock.extend(loan.data for loan in back)
            return len(back)

    def run(self, stop: threading.Event, every: float) -> None:
        while not stop.wait(every):
            self.sweep()


class Compressor:
    def __init__(self, shelf: Shelf, codec) -> None:
        self.shelf = shelf
        self.codec = codec
        self.window: Loan | None = None

    def squeeze(self, body: bytes) -> bytes:
        loan = self.shelf.lend("squeeze")  # clean: marked after the use
        if loan is None:
            return body
        n = self.codec.compress(body, loan.data)
        out = bytes(loan.data[:n])
        loan.mark_idle()
        return out

    def squeeze_if_smaller(self, body: bytes) -> bytes:
        loan = self.shelf.lend("smaller")  # leak: not marked when the body did not get smaller
        if loan is None:
            return body
        n = self.codec.compress(body, loan.data)
        if n >= len(body):
            return body
        out = bytes(loan.data[:n])
        loan.mark_idle()
        return out

    def squeeze_or_keep(self, body: bytes) -> bytes:
        loan = self.shelf.lend("keep")  # clean: near miss, marked before the choice
        if loan is None:
            return body
        n = self.codec.compress(body, loan.data)
        out = bytes(loan.data[:n])
        loan.idle = True
        return out if n < len(body) else body

    def best_of(self, body: bytes, levels: list[int]) -> bytes:
        best = body
        for level in levels:
            loan = self.shelf.lend("best")  # clean: near miss, marked in every turn before the continue
            if loan is None:
                break
            n = self.codec.compress(body, loan.data, level)
            candidate = bytes(loan.data[:n])
            loan.idle = True
            if n >= len(best):
                continue
            best = candidate
        return best

    def transcode(self, body: bytes) -> bytes | None:
        loan = self.shelf.lend("plain")  # leak: the name goes to the second loan, the first is not marked
        if loan is None:
            return None
        n = self.codec.decompress(body, loan.data)
        plain = bytes(loan.data[:n])
        loan = self.shelf.lend("packed")  # clean: marked
        if loan is None:
            return None
        n = self.codec.compress(plain, loan.data)
        out = bytes(loan.data[:n])
        loan.mark_idle()
        return out

    def open_window(self) -> bool:
        self.close_window()
        self.window = self.shelf.lend("window")  # clean: near miss, the old one is marked by close_window
        return self.window is not None

    def close_window(self) -> None:
        if self.window is not None:
            self.window.idle = True
            self.window = None


class Joiner:
    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def join(self, chunks: list[bytes]) -> bytes:
        loans: list[Loan] = []
        for chunk in chunks:
            loan = self.shelf.lend("join")  # clean: near miss, all are marked in the loop below
            if loan is None:
                break
            loan.data[:len(chunk)] = chunk
            loans.append(loan)
        out = b"".join(bytes(l.data[:len(c)]) for l, c in zip(loans, chunks))
        for loan in loans:
            loan.idle = True
        return out

    def interleave(self, left: bytes, right: bytes) -> bytes:
        a = self.shelf.lend("left")  # clean: marked on both ways
        if a is None:
            return left + right
        b = self.shelf.lend("right")  # leak: only the first of the two is marked
        if b is None:
            a.idle = True
            return left + right
        a.data[:len(left)] = left
        b.data[:len(right)] = right
        out = bytes(x for ab in zip(a.data, b.data) for x in ab)
        a.idle = True
        return out
