"""Embeddings of images and audio, shared among requests by content hash."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional


class EncoderBudget:
    """Encoder tokens per step."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def withdraw(self, n: int) -> bool:
        if n > self.tokens:
            return False
        self.tokens -= n
        return True

    def deposit(self, n: int) -> None:
        self.tokens += n


class Entry:
    def __init__(self, digest: str, value: Any) -> None:
        self.digest = digest
        self.value = value
        self.holders = 0


class EmbeddingStore:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._guard = threading.RLock()
        self._table: Dict[str, Entry] = {}

    def hold(self, digest: str) -> Optional[Entry]:
        with self._guard:
            entry = self._table.get(digest)
            if entry is not None:
                entry.holders += 1
            return entry

    def unhold(self, entry: Entry) -> None:
        with self._guard:
            entry.holders -= 1
            if entry.holders == 0 and len(self._table) > self.limit:
                self._table.pop(entry.digest, None)

    def publish(self, digest: str, value: Any) -> Entry:
        """Stores the value and returns its entry, held for the caller."""
        with self._guard:
            entry = self._table.setdefault(digest, Entry(digest, value))
            entry.holders += 1
            return entry

    def publish_locked(self, digest: str, value: Any) -> bool:
        self._guard.acquire()  # leak: a digest that is known returns False under the lock
        if digest in self._table:
            return False
        self._table[digest] = Entry(digest, value)
        self._guard.release()
        return True

    @contextmanager
    def holding(self, digest: str) -> Iterator[Optional[Entry]]:
        entry = self.hold(digest)  # clean: unheld in the finally
        try:
            yield entry
        finally:
            if entry is not None:
                self.unhold(entry)
