"""Shared-memory message ring between the engine core and its workers, with a log of dropped messages."""
from __future__ import annotations

import json
import mmap
import struct
import time
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Sequence

HEADER = struct.Struct("<II")


@dataclass
class Cell:
    index: int
    view: memoryview


class MessageRing:
    """Writers reserve a cell and then commit or abandon it; readers claim a cell and then retire it."""

    def __init__(self, cells: int, cell_size: int) -> None:
        self.cell_size = cell_size
        self.map = mmap.mmap(-1, cells * cell_size)
        self.empty = list(range(cells))
        self.full: list[int] = []
        self.busy: set[int] = set()

    def _cell(self, index: int) -> Cell:
        start = index * self.cell_size
        self.busy.add(index)
        return Cell(index, memoryview(self.map)[start:start + self.cell_size])

    def reserve(self) -> Optional[Cell]:
        return self._cell(self.empty.pop(0)) if self.empty else None

    def commit(self, cell: Cell) -> None:
        self.busy.discard(cell.index)
        self.full.append(cell.index)

    def abandon(self, cell: Cell) -> None:
        self.busy.discard(cell.index)
        self.empty.append(cell.index)

    def claim(self) -> Optional[Cell]:
        return self._cell(self.full.pop(0)) if self.full else None

    def retire(self, cell: Cell) -> None:
        self.abandon(cell)

    def reserve_spin(self, timeout: float) -> Optional[Cell]:
        until = time.monotonic() + timeout
        cell = self.reserve()  # clean: near miss, the loop runs only while it is None
        while cell is None and time.monotonic() < until:
            time.sleep(0)
            cell = self.reserve()  # clean: handed to the caller
        return cell

    def skip(self, count: int) -> int:
        """Discard unread messages."""
        skipped = 0
        for _ in range(count):
            cell = self.claim()  # leak: discarded messages are not retired, so their cells stay busy
            if cell is None:
                break
            skipped += 1
        return skipped


class ReservedCell:
    """`with` form of reserve and commit; abandons on error."""

    def __init__(self, ring: MessageRing) -> None:
        self.ring = ring
        self.cell: Optional[Cell] = None

    def __enter__(self) -> Optional[Cell]:
        self.cell = self.ring.reserve()  # clean: committed or abandoned in __exit__
        return self.cell

    def __exit__(self, kind: Any, exc: Any, tb: Any) -> bool:
        if self.cell is None:
            return False
        if kind is not None:
            self.ring.abandon(self.cell)
        else:
            self.ring.commit(self.cell)
        return False


class Writer:
    def __init__(self, ring: MessageRing, log_path: str) -> None:
        self.ring = ring
        self.log_path = log_path
        self.open_batch: list[Cell] = []

    def _encode(self, cell: Cell, obj: Any) -> bool:
        data = json.dumps(obj).encode()
        if len(data) + HEADER.size > len(cell.view):
            return False
        HEADER.pack_into(cell.view, 0, len(data), 0)
        cell.view[HEADER.size:HEADER.size + len(data)] = data
        return True

    def send(self, obj: Any) -> bool:
        cell = self.ring.reserve_spin(0.5)  # clean: committed or abandoned
        if cell is None:
            self._log(obj)
            return False
        if not self._encode(cell, obj):
            self.ring.abandon(cell)
            return False
        self.ring.commit(cell)
        return True

    def send_small(self, obj: Any, limit: int) -> bool:
        cell = self.ring.reserve()  # leak: an object that does not fit returns False without abandon
        if cell is None:
            return False
        if not self._encode(cell, obj):
            self._log(obj)
            return False
        self.ring.commit(cell)
        return limit > 0

    def send_scoped(self, obj: Any) -> bool:
        with ReservedCell(self.ring) as cell:  # clean: __exit__ commits
            return cell is not None and self._encode(cell, obj)

    def stage(self, obj: Any) -> bool:
        cell = self.ring.reserve()  # clean: near miss, publish() commits the staged cells
        if cell is None:
            return False
        if not self._encode(cell, obj):
            self.ring.abandon(cell)
            return False
        self.open_batch.append(cell)
        return True

    def publish(self) -> int:
        staged, self.open_batch = self.open_batch, []
        for cell in staged:
            self.ring.commit(cell)
        return len(staged)

    def send_parts(self, parts: Sequence[Any]) -> bool:
        """All parts or none."""
        cells: list[Cell] = []
        for part in parts:
            cell = self.ring.reserve()  # leak: a part too large abandons the earlier cells, not its own
            if cell is None:
                break
            if not self._encode(cell, part):
                for got in cells:
                    self.ring.abandon(got)
                return False
            cells.append(cell)
        if len(cells) < len(parts):
            for got in cells:
                self.ring.abandon(got)
            return False
        for got in cells:
            self.ring.commit(got)
        return True

    def _log(self, obj: Any) -> None:
        fh = open(self.log_path, "a")  # clean: closed in finally
        try:
            fh.write(json.dumps(obj) + "\n")
        finally:
            fh.close()

    def dropped(self) -> int:
        return sum(1 for _ in open(self.log_path))  # leak: the file is iterated and never closed


class Reader:
    def __init__(self, ring: MessageRing) -> None:
        self.ring = ring
        self.current: Optional[Cell] = None

    def _decode(self, cell: Cell) -> Any:
        length, _ = HEADER.unpack_from(cell.view, 0)
        return json.loads(bytes(cell.view[HEADER.size:HEADER.size + length]))

    def recv(self) -> Any:
        cell = self.ring.claim()  # clean: retired after decoding
        if cell is None:
            return None
        obj = self._decode(cell)
        self.ring.retire(cell)
        return obj

    def recv_kind(self, kind: str) -> Any:
        while True:
            cell = self.ring.claim()  # leak: messages of another kind go round without retire
            if cell is None:
                return None
            obj = self._decode(cell)
            if obj.get("kind") != kind:
                continue
            self.ring.retire(cell)
            return obj

    def peek(self) -> Any:
        """Decode the next message and keep it as the current one until done() is called."""
        if self.current is None:
            self.current = self.ring.claim()  # clean: near miss, done() retires it
        return None if self.current is None else self._decode(self.current)

    def done(self) -> None:
        if self.current is not None:
            self.ring.retire(self.current)
            self.current = None

    def drain(self) -> Iterator[Any]:
        while (cell := self.ring.claim()) is not None:  # clean: retired in every pass before the yield
            obj = self._decode(cell)
            self.ring.retire(cell)
            yield obj
