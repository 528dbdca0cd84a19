"""Embedding cache with pinned entries: a pinned entry may not be evicted, pages of its vectors come from an arena."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

log = logging.getLogger("embcache")


class PageArena:
    def __init__(self, pages: int, floats: int) -> None:
        self.floats = floats
        self._free = list(range(pages))
        self._data = [[0.0] * floats for _ in range(pages)]

    def alloc(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def free(self, page: int) -> None:
        self._free.append(page)

    def write(self, page: int, values: Sequence[float]) -> None:
        self._data[page][: len(values)] = values

    def read(self, page: int) -> list[float]:
        return list(self._data[page])


@dataclass
class Entry:
    key: str
    page: int
    pins: int = 0
    hits: int = 0


class EmbeddingCache:
    def __init__(self, arena: PageArena, capacity: int) -> None:
        self.arena = arena
        self.capacity = capacity
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def pin(self, key: str) -> Optional[Entry]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.pins += 1
            entry.hits += 1
            self._entries.move_to_end(key)
            return entry

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1

    def insert(self, key: str, values: Sequence[float]) -> bool:
        with self._lock:
            if key in self._entries:
                return True
            if len(self._entries) >= self.capacity and not self._evict():
                return False
            page = self.arena.alloc()  # clean: near miss, kept in the entry, _evict and drop free it
            if page is None:
                return False
            self.arena.write(page, values)
            self._entries[key] = Entry(key, page)
            return True

    def _evict(self) -> bool:
        for key, entry in self._entries.items():
            if entry.pins == 0:
                del self._entries[key]
                self.arena.free(entry.page)
                return True
        return False

    def drop(self, key: str) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.pins:
                return False
            del self._entries[key]
            self.arena.free(entry.page)
            return True

    def pin_or_load(self, key: str, load: Callable[[str], Sequence[float]]) -> Optional[Entry]:
        entry = self.pin(key)  # clean: handed to the caller
        if entry is not None:
            return entry
        if not self.insert(key, load(key)):
            return None
        return self.pin(key)  # clean: handed to the caller

class ScratchIndex:
    """Short-lived vectors of one tenant, least recently written goes first."""

    def __init__(self, arena: PageArena, keep: int) -> None:
        self.arena = arena
        self.keep = keep
        self._pages: OrderedDict[str, int] = OrderedDict()

    def put(self, key: str, values: Sequence[float]) -> bool:
        page = self._pages.get(key)
        if page is None:
            page = self.arena.alloc()  # leak: trim() pops the pages of old keys and never frees them
            if page is None:
                return False
        self.arena.write(page, values)
        self._pages[key] = page
        self._pages.move_to_end(key)
        self.trim()
        return True

    def get(self, key: str) -> Optional[list[float]]:
        page = self._pages.get(key)
        return None if page is None else self.arena.read(page)

    def trim(self) -> None:
        while len(self._pages) > self.keep:
            key, page = self._pages.popitem(last=False)
            log.debug("scratch %s leaves page %d", key, page)


@dataclass
class Query:
    ident: int
    entries: list[Entry] = field(default_factory=list)
    answer: Optional[float] = None


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b))


class Searcher:
    def __init__(self, cache: EmbeddingCache, load: Callable[[str], Sequence[float]]) -> None:
        self.cache = cache
        self.load = load
        self._running: dict[int, Query] = {}

    def warm(self, keys: Sequence[str]) -> int:
        loaded = 0
        for key in keys:
            entry = self.cache.pin_or_load(key, self.load)  # leak: only entries that were hit before are unpinned
            if entry is None:
                break
            loaded += 1
            if entry.hits > 1:
                self.cache.unpin(entry)
        return loaded

    def touch(self, keys: Sequence[str]) -> int:
        touched = 0
        for key in keys:
            if (entry := self.cache.pin(key)) is not None:  # clean: near miss, unpinned inside the branch
                touched += 1
                self.cache.unpin(entry)
        return touched

    def score(self, left: str, right: str) -> Optional[float]:
        a = self.cache.pin_or_load(left, self.load)  # clean: unpinned on both ways
        if a is None:
            return None
        b = self.cache.pin_or_load(right, self.load)  # clean: None-checked, unpinned at the end
        if b is None:
            self.cache.unpin(a)
            return None
        result = dot(self.cache.arena.read(a.page), self.cache.arena.read(b.page))
        self.cache.unpin(b)
        self.cache.unpin(a)
        return result

    def distance(self, left: str, right: str) -> float:
        a = self.cache.pin(left)  # leak: stays pinned where the right side is absent
        b = self.cache.pin(right)  # leak: stays pinned where the left side is absent
        if a is None or b is None:
            return 1.0
        result = 1.0 - dot(self.cache.arena.read(a.page), self.cache.arena.read(b.page))
        self.cache.unpin(a)
        self.cache.unpin(b)
        return result

    def nearest(self, vector: Sequence[float], keys: Sequence[str]) -> Optional[str]:
        best: Optional[Entry] = None
        best_score = float("-inf")
        for key in keys:
            entry = self.cache.pin(key)  # leak: a better one replaces best, which stays pinned
            if entry is None:
                continue
            score = dot(vector, self.cache.arena.read(entry.page))
            if score <= best_score:
                self.cache.unpin(entry)
                continue
            best, best_score = entry, score
        if best is None:
            return None
        self.cache.unpin(best)
        return best.key

    def farthest(self, vector: Sequence[float], keys: Sequence[str]) -> Optional[str]:
        worst: Optional[Entry] = None
        worst_score = float("inf")
        for key in keys:
            entry = self.cache.pin(key)  # clean: near miss, the replaced one is unpinned first
            if entry is None:
                continue
            score = dot(vector, self.cache.arena.read(entry.page))
            if score >= worst_score:
                self.cache.unpin(entry)
                continue
            if worst is not None:
                self.cache.unpin(worst)
            worst, worst_score = entry, score
        if worst is None:
            return None
        self.cache.unpin(worst)
        return worst.key

    def average(self, keys: Sequence[str]) -> float:
        with ExitStack() as stack:
            total = 0.0
            for key in keys:
                entry = self.cache.pin(key)  # clean: near miss, the exit stack unpins it
                if entry is None:
                    continue
                stack.callback(self.cache.unpin, entry)
                total += sum(self.cache.arena.read(entry.page))
            return total / max(1, len(keys))

    def begin(self, ident: int, keys: Sequence[str]) -> Query:
        if ident in self._running:
            return self._running[ident]
        query = Query(ident)
        for key in keys:
            entry = self.cache.pin_or_load(key, self.load)  # clean: near miss, finish() and abort() unpin the list
            if entry is not None:
                query.entries.append(entry)
        self._running[ident] = query
        return query

    def finish(self, ident: int, answer: float) -> Optional[Query]:
        query = self._running.pop(ident, None)
        if query is None:
            return None
        query.answer = answer
        self._release(query)
        return query

    def abort(self, ident: int) -> None:
        query = self._running.pop(ident, None)
        if query is not None:
            self._release(query)

    def _release(self, query: Query) -> None:
        for entry in query.entries:
            self.cache.unpin(entry)
        query.entries.clear()
