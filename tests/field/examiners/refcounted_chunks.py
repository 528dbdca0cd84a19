"""Reference counted memory chunks behind a local KV store."""
from __future__ import annotations

import threading
from typing import Dict, Iterable, List, Optional


class Chunk:
    def __init__(self, arena: "Arena", offset: int, size: int):
        self.arena = arena
        self.offset = offset
        self.size = size
        self.refs = 1

    def ref_up(self) -> None:
        with self.arena.lock:
            self.refs += 1

    def ref_down(self) -> None:
        with self.arena.lock:
            self.refs -= 1
            if self.refs == 0:
                self.arena.reclaim(self)


class Arena:
    def __init__(self, total: int):
        self.lock = threading.RLock()
        self.available = total
        self._cursor = 0

    def carve(self, size: int) -> Optional[Chunk]:
        with self.lock:
            if self.available < size:
                return None
            self.available -= size  # clean: the amount travels with the chunk that is returned
            self._cursor += size
            return Chunk(self, self._cursor - size, size)

    def reserve(self, size: int, limit: int) -> bool:
        """Set bytes aside; True means that the caller owes an unreserve."""
        with self.lock:
            self.available -= size  # leak: above the limit False is returned and the bytes stay subtracted
            if size > limit:
                return False
            if self.available < 0:
                self.available += size
                return False
            return True

    def unreserve(self, size: int) -> None:
        with self.lock:
            self.available += size

    def reclaim(self, chunk: Chunk) -> None:
        self.available += chunk.size


class LocalStore:
    """Hash keyed chunks, each entry owns one reference."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.entries: Dict[int, Chunk] = {}

    def insert(self, key: int, payload: bytes) -> bool:
        chunk = self.arena.carve(len(payload))  # clean: near miss, freed if the key is present, else owned by the entry
        if chunk is None:
            return False
        if key in self.entries:
            chunk.ref_down()
            return True
        self.entries[key] = chunk
        return True

    def insert_many(self, items: Dict[int, bytes]) -> int:
        stored = 0
        for key, payload in items.items():
            chunk = self.arena.carve(len(payload))  # leak: the continue for a known key skips ref_down
            if chunk is None:
                break
            if key in self.entries:
                continue
            self.entries[key] = chunk
            stored += 1
        return stored

    def get(self, key: int) -> Optional[Chunk]:
        """The caller owns a reference to what is returned."""
        chunk = self.entries.get(key)
        if chunk is not None:
            chunk.ref_up()  # clean: the reference is the caller's
        return chunk

    def evict(self, key: int) -> bool:
        chunk = self.entries.pop(key, None)
        if chunk is None:
            return False
        chunk.ref_down()
        return True

    def contains(self, key: int) -> bool:
        return self.get(key) is not None  # leak: the reference that get takes is thrown away

    def size_of(self, key: int) -> int:
        chunk = self.get(key)  # clean: near miss, None holds nothing and the other path drops the reference
        if chunk is None:
            return 0
        size = chunk.size
        chunk.ref_down()
        return size


class Prefetcher:
    def __init__(self, store: LocalStore):
        self.store = store
        self.pinned: List[Chunk] = []

    def pin_prefix(self, keys: Iterable[int]) -> int:
        for key in keys:
            chunk = self.store.get(key)  # clean: kept in pinned, which unpin empties
            if chunk is None:
                break
            self.pinned.append(chunk)
        return len(self.pinned)

    def longest_span(self, keys: Iterable[int]) -> int:
        best = 0
        for key in keys:
            chunk = self.store.get(key)  # leak: the break for an empty chunk leaves the reference
            if chunk is None:
                break
            if chunk.size == 0:
                break
            best += chunk.size
            chunk.ref_down()
        return best

    def total_span(self, keys: Iterable[int]) -> int:
        total = 0
        for key in keys:
            chunk = self.store.get(key)  # clean: near miss, both exits from the round drop the reference
            if chunk is None:
                break
            size = chunk.size
            chunk.ref_down()
            if size == 0:
                break
            total += size
        return total

    def unpin(self) -> None:
        while self.pinned:
            self.pinned.pop().ref_down()

    def preload(self, size: int, limit: int) -> bool:
        if not self.store.arena.reserve(size, limit):  # clean: near miss, True is unreserved, after False the caller owes nothing
            return False
        self.unpin()
        self.store.arena.unreserve(size)
        return True

    def preload_twice(self, a: int, b: int, limit: int) -> bool:
        if not self.store.arena.reserve(a, limit):  # leak: the failure of the second reserve leaves this one
            return False
        if not self.store.arena.reserve(b, limit):  # clean: unreserved on its success path
            return False
        self.store.arena.unreserve(b)
        self.store.arena.unreserve(a)
        return True
