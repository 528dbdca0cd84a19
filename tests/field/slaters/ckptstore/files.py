"""Files that appear under their name only when complete."""
from __future__ import annotations

import os
from typing import BinaryIO, Optional


class AtomicFile:
    def __init__(self, path: str) -> None:
        self.path = path
        self.tmp = path + ".part"
        self._f: Optional[BinaryIO] = open(self.tmp, "wb")  # clean: commit and discard both close it

    def write(self, data: bytes) -> int:
        return self._f.write(data)

    def commit(self) -> None:
        self._f.close()
        self._f = None
        os.replace(self.tmp, self.path)

    def discard(self) -> None:
        if self._f is not None:
            self._f.close()
            self._f = None
            os.unlink(self.tmp)


class WriterSlots:
    """Upper bound on concurrently open shard files of a node."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0

    def enter_slot(self) -> bool:
        if self.open >= self.limit:
            return False
        self.open += 1
        return True

    def leave_slot(self) -> None:
        self.open -= 1


class SlottedFile:
    """An AtomicFile that holds one writer slot while it is open."""

    def __init__(self, slots: WriterSlots, path: str) -> None:
        self.slots = slots
        self.inner = AtomicFile(path)  # clean: closed through commit or discard

    @classmethod
    def create(cls, slots: WriterSlots, path: str) -> Optional["SlottedFile"]:
        if not slots.enter_slot():  # clean: near miss, left again when the file cannot be opened, else by commit or discard
            return None
        try:
            return cls(slots, path)  # clean: returned
        except OSError:
            slots.leave_slot()
            return None

    def commit(self) -> None:
        self.inner.commit()
        self.slots.leave_slot()

    def discard(self) -> None:
        self.inner.discard()
        self.slots.leave_slot()
