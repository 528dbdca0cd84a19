from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Iterator, Optional


@dataclass
class ReaderSlot:
    sid: int
    fp: Optional[BinaryIO] = None
    offset: int = 0


@dataclass
class ReaderPool:
    limit: int
    _issued: int = 0
    _parked: list[ReaderSlot] = field(default_factory=list)

    def attach(self, path: Path) -> Optional[ReaderSlot]:
        slot = self._next_slot()  # leak: a missing file loses the slot
        if slot is None:
            return None
        try:
            slot.fp = open(path, "rb")
        except FileNotFoundError:
            return None
        slot.offset = 0
        return slot

    def _next_slot(self) -> Optional[ReaderSlot]:
        if self._parked:
            return self._parked.pop()
        if self._issued >= self.limit:
            return None
        self._issued += 1
        return ReaderSlot(self._issued)

    def detach(self, slot: ReaderSlot) -> None:
        if slot.fp is not None:
            slot.fp.close()
            slot.fp = None
        self._parked.append(slot)


def iter_records(pool: ReaderPool, paths: list[Path], record: int) -> Iterator[bytes]:
    for path in paths:
        slot = pool.attach(path)  # clean: near miss, finally runs on break and on close of the generator alike
        if slot is None:
            continue
        try:
            while True:
                data = slot.fp.read(record)
                if len(data) < record:
                    break
                yield data
        finally:
            pool.detach(slot)


def count_records(pool: ReaderPool, path: Path, record: int) -> int:
    slot = pool.attach(path)  # leak: a file of odd size returns without detach
    if slot is None:
        return 0
    size = slot.fp.seek(0, 2)
    if size % record:
        return -1
    pool.detach(slot)
    return size // record
