"""Open shard handles, shared between readers and counted."""
from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import BinaryIO, Iterator
from contextlib import contextmanager


@dataclass
class _Entry:
    fh: BinaryIO
    users: int = 0


class HandleTable:
    """At most one open file for each path; closed when its last user gives it back."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def borrow(self, path: str) -> BinaryIO:
        with self._lock:
            entry = self._entries.get(path)
            if entry is None:
                fh = open(path, "rb")  # clean: near miss, kept in the table, closed by giveback
                entry = self._entries[path] = _Entry(fh)
            entry.users += 1
            return entry.fh

    def giveback(self, path: str) -> None:
        with self._lock:
            entry = self._entries[path]
            entry.users -= 1
            if entry.users == 0:
                del self._entries[path]
                entry.fh.close()

    @contextmanager
    def using(self, path: str) -> Iterator[BinaryIO]:
        fh = self.borrow(path)  # clean: given back when the block ends
        try:
            yield fh
        finally:
            self.giveback(path)


class WriterTable:
    """Append handles by shard number, rolled over at a size limit."""

    def __init__(self, root: str, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._current = None
        self._number = 0

    def append(self, blob: bytes) -> tuple[int, int]:
        if self._current is None or self._current.tell() + len(blob) > self._limit:
            self._number += 1
            name = os.path.join(self._root, f"shard-{self._number:05d}.bin")
            self._current = open(name, "ab")  # leak: the full shard's handle is overwritten at roll-over
        offset = self._current.tell()
        self._current.write(blob)
        return self._number, offset

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None
