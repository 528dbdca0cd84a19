"""Data sources of an input pipeline: base classes, mixins and their close()."""
from __future__ import annotations

import itertools
import queue
from abc import ABC, abstractmethod


class RingTable:
    def __init__(self, count: int, depth: int) -> None:
        self._spare = [queue.Queue(maxsize=depth) for _ in range(count)]

    def claim(self) -> queue.Queue:
        if not self._spare:
            raise LookupError("no ring is spare")
        return self._spare.pop()

    def unclaim(self, ring: queue.Queue) -> None:
        while not ring.empty():
            ring.get_nowait()
        self._spare.append(ring)


class ScratchArena:
    def __init__(self, nbytes: int, count: int) -> None:
        self._spare = [bytearray(nbytes) for _ in range(count)]

    def borrow(self) -> bytearray:
        return self._spare.pop()

    def give_back(self, scratch: bytearray) -> None:
        self._spare.append(scratch)


class MeterBoard:
    """Numbered meters; a source that reports keeps one until it withdraws."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._live: dict[int, str] = {}

    def enroll(self, name: str) -> int:
        ident = next(self._ids)
        self._live[ident] = name
        return ident

    def withdraw(self, ident: int) -> None:
        del self._live[ident]


class Source(ABC):
    def __init__(self, rings: RingTable) -> None:
        self.rings = rings
        self.ring: queue.Queue | None = None
        self.rows = 0

    def _open_ring(self) -> queue.Queue:
        return self.rings.claim()  # clean: handed to the subclass that asked

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def decode(self, row: bytes) -> object: ...

    def push(self, row: bytes) -> None:
        self.ring.put(self.decode(row))
        self.rows += 1

    def close(self) -> None:
        if self.ring is not None:
            self.rings.unclaim(self.ring)
            self.ring = None
        self._close_extra()

    def _close_extra(self) -> None:
        """For subclasses which hold more than the ring."""


class TextSource(Source):
    def open(self) -> None:
        if self.ring is None:
            self.ring = self._open_ring()  # clean: the inherited close() unclaims it

    def decode(self, row: bytes) -> str:
        return row.decode("utf-8", "replace").rstrip("\n")


class JpegSource(Source):
    def __init__(self, rings: RingTable, arena: ScratchArena) -> None:
        super().__init__(rings)
        self.arena = arena
        self.scratch = arena.borrow()  # clean: near miss, given back by the hook the base's close() calls

    def open(self) -> None:
        self.ring = self._open_ring()  # clean: near miss, close() is inherited and unclaims it

    def decode(self, row: bytes) -> memoryview:
        self.scratch[: len(row)] = row
        return memoryview(bytes(self.scratch[: len(row)]))

    def _close_extra(self) -> None:
        self.arena.give_back(self.scratch)


class TarSource(Source):
    def __init__(self, rings: RingTable, arena: ScratchArena) -> None:
        super().__init__(rings)
        self.arena = arena
        self.scratch: bytearray | None = None

    def open(self) -> None:
        self.ring = self._open_ring()  # leak: close() here replaces the base's and handles only scratch
        self.scratch = self.arena.borrow()  # clean: near miss, close() gives back this half

    def decode(self, row: bytes) -> tuple[bytes, bytes]:
        return row[:100].rstrip(b"\0"), row[512:]

    def close(self) -> None:
        if self.scratch is not None:
            self.arena.give_back(self.scratch)
            self.scratch = None
        self.rows = 0


class AudioSource(Source):
    def __init__(self, rings: RingTable, arena: ScratchArena, taps: int) -> None:
        super().__init__(rings)
        self.arena = arena
        self.taps = taps
        self.window = arena.borrow()  # leak: close() only goes to the base, which knows of no window

    def open(self) -> None:
        self.ring = self._open_ring()  # clean: near miss, close() calls super().close()

    def decode(self, row: bytes) -> bytes:
        self.window[: self.taps] = row[: self.taps]
        return bytes(self.window[: self.taps])

    def close(self) -> None:
        self.taps = 0
        super().close()


class Metered:
    """Mixin: start_meter() enrolls, stop_meter() withdraws."""

    board: MeterBoard
    meter: int | None = None

    def start_meter(self, name: str) -> None:
        self.meter = self.board.enroll(name)  # clean: kept for stop_meter()

    def stop_meter(self) -> None:
        if self.meter is not None:
            self.board.withdraw(self.meter)
            self.meter = None


class MeteredText(Metered, TextSource):
    def __init__(self, rings: RingTable, board: MeterBoard) -> None:
        TextSource.__init__(self, rings)
        self.board = board
        self.start_meter("text")  # clean: near miss, close() stops the meter and then closes the base

    def close(self) -> None:
        self.stop_meter()
        super().close()


class MixedSource(Source):
    """Draws from several children; they belong to the mix unless `shared`."""

    def __init__(self, rings: RingTable, board: MeterBoard, children: list[Source], shared: bool) -> None:
        super().__init__(rings)
        self.board = board
        self.children = children
        self.shared = shared
        self.meter = board.enroll("mix")  # leak: close() of a shared mix returns before withdraw()
        self._turn = itertools.cycle(range(len(children)))

    def open(self) -> None:
        self.ring = self._open_ring()  # clean: near miss, unclaimed before the shared guard returns

    def decode(self, row: bytes) -> object:
        return self.children[next(self._turn)].decode(row)

    def close(self) -> None:
        super().close()
        if self.shared:
            return
        for child in self.children:
            child.close()
        self.board.withdraw(self.meter)


def count_lines(rings: RingTable, rows: list[bytes]) -> int:
    source = TextSource(rings)
    source.open()  # clean: closed in finally
    try:
        for row in rows:
            source.push(row)
        return source.rows
    finally:
        source.close()
