"""Multimodal encoder cache. Entries are pinned while a request still has image tokens to prefill."""
from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, Protocol


class Entry:
    __slots__ = ("key", "cells", "pin_count")

    def __init__(self, key: str, cells: list[int]) -> None:
        self.key = key
        self.cells = cells
        self.pin_count = 0


class CellStore(Protocol):
    def carve(self, n: int) -> Optional[list[int]]: ...

    def fill(self, cells: list[int]) -> None: ...


class FlatCells:
    """Plain stack of embedding cells."""

    def __init__(self, n: int) -> None:
        self._stack = list(range(n))

    def carve(self, n: int) -> Optional[list[int]]:
        if len(self._stack) < n:
            return None
        return [self._stack.pop() for _ in range(n)]

    def fill(self, cells: list[int]) -> None:
        self._stack.extend(cells)


class PaddedCells:
    """Rounds requests up; the surplus must not be lost."""

    def __init__(self, inner: FlatCells, quantum: int) -> None:
        self.inner = inner
        self.quantum = quantum
        self._surplus: dict[int, list[int]] = {}

    def carve(self, n: int) -> Optional[list[int]]:
        total = -(-n // self.quantum) * self.quantum
        cells = self.inner.carve(total)  # clean: near miss, the surplus is kept under its first cell
        if cells is None:
            return None
        head, tail = cells[:n], cells[n:]
        if head:
            self._surplus[head[0]] = tail
        return head

    def fill(self, cells: list[int]) -> None:
        if cells:
            self.inner.fill(cells + self._surplus.pop(cells[0]))


class AlignedCells:
    """Returns only runs that begin at an even cell."""

    def __init__(self, inner: FlatCells) -> None:
        self.inner = inner

    def carve(self, n: int) -> Optional[list[int]]:
        cells = self.inner.carve(n + 1)  # leak: the extra cell is cut off and known to nobody
        if cells is None:
            return None
        start = cells[0] % 2
        return cells[start:start + n]

    def fill(self, cells: list[int]) -> None:
        self.inner.fill(cells)


class Image(NamedTuple):
    data: bytes
    tokens: int


@dataclass
class MMRequest:
    rid: str
    images: list[Image]
    pinned: list[Entry] = field(default_factory=list)
    next_image: int = 0


class EncoderCache:
    def __init__(self, store: CellStore) -> None:
        self.store = store
        self.entries: "OrderedDict[str, Entry]" = OrderedDict()
        self.failures: dict[str, int] = defaultdict(int)

    @staticmethod
    def key_of(image: Image) -> str:
        return hashlib.blake2b(image.data, digest_size=16).hexdigest()

    def lookup(self, key: str) -> Optional[Entry]:
        """Pinned entry, or None. Undo with unpin()."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        self.entries.move_to_end(key)
        entry.pin_count += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        entry.pin_count -= 1

    def put(self, image: Image) -> Optional[Entry]:
        """Encode and insert; the result is pinned once for the caller."""
        cells = self.store.carve(image.tokens)  # clean: near miss, the first try; None leads to the second
        if cells is None:
            self.shrink(image.tokens)
            cells = self.store.carve(image.tokens)  # clean: owned by the entry, shrink() fills it back
        if cells is None:
            return None
        entry = Entry(self.key_of(image), cells)
        entry.pin_count = 1
        self.entries[entry.key] = entry
        return entry

    def get_or_put(self, image: Image) -> Optional[Entry]:
        entry = self.lookup(self.key_of(image))  # clean: handed to the caller
        if entry is not None:
            return entry
        return self.put(image)  # clean: handed to the caller

    def shrink(self, want: int) -> int:
        freed = 0
        for key, entry in list(self.entries.items()):
            if freed >= want:
                break
            if entry.pin_count:
                continue
            del self.entries[key]
            self.store.fill(entry.cells)
            freed += len(entry.cells)
        return freed


class EncoderScheduler:
    def __init__(self, cache: EncoderCache, budget: int) -> None:
        self.cache = cache
        self.budget = budget
        self.live: dict[str, MMRequest] = {}

    def begin(self, req: MMRequest) -> bool:
        for image in req.images:
            entry = self.cache.get_or_put(image)  # clean: in req.pinned, finish() or the rollback unpins
            if entry is None:
                self._unpin_all(req)
                return False
            req.pinned.append(entry)
        self.live[req.rid] = req
        return True

    def _unpin_all(self, req: MMRequest) -> None:
        while req.pinned:
            self.cache.unpin(req.pinned.pop())

    def finish(self, rid: str) -> None:
        self._unpin_all(self.live.pop(rid))

    def advance(self, rid: str) -> Optional[list[int]]:
        """Cells of the next image of a live request."""
        req = self.live[rid]
        if req.next_image >= len(req.images):
            return None
        cells = req.pinned[req.next_image].cells
        req.next_image += 1
        return cells

    def is_cached(self, image: Image) -> bool:
        return self.cache.lookup(self.cache.key_of(image)) is not None  # leak: pins for a yes or no

    def prefetch(self, images: list[Image]) -> int:
        spent = 0
        for image in images:
            entry = self.cache.get_or_put(image)  # leak: break at the budget comes before unpin
            if entry is None:
                break
            spent += image.tokens
            if spent > self.budget:
                break
            self.cache.unpin(entry)
        return spent

    def begin_dedup(self, req: MMRequest) -> bool:
        """Like begin(), but an image repeated within the request is pinned once."""
        seen: dict[str, Entry] = {}
        for image in req.images:
            entry = self.cache.get_or_put(image)  # leak: the repeat's second pin is overwritten in seen
            if entry is None:
                for held in seen.values():
                    self.cache.unpin(held)
                return False
            seen[entry.key] = entry
        req.pinned = list(seen.values())
        self.live[req.rid] = req
        return True

    def begin_unique(self, req: MMRequest) -> bool:
        seen: dict[str, Entry] = {}
        for image in req.images:
            key = self.cache.key_of(image)
            if key in seen:
                continue
            entry = self.cache.get_or_put(image)  # clean: near miss, repeats are skipped before pinning
            if entry is None:
                for held in seen.values():
                    self.cache.unpin(held)
                return False
            seen[key] = entry
        req.pinned = list(seen.values())
        self.live[req.rid] = req
        return True
