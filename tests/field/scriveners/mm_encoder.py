"""Image and audio encoders of the multimodal server: feature pages and their bookkeeping."""
from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Deque, Iterable, Optional

import torch

log = logging.getLogger("mm_encoder")
PAGE_ROWS = 64


class FeaturePages:
    """Allocator of fixed pages in one large feature matrix."""

    def __init__(self, pages: int, width: int) -> None:
        self.store = torch.zeros(pages * PAGE_ROWS, width)
        self._free: Deque[int] = deque(range(pages))

    def available(self) -> int:
        return len(self._free)

    def alloc(self, rows: int) -> Optional[list[int]]:
        need = -(-rows // PAGE_ROWS)
        if need > len(self._free):
            return None
        return [self._free.popleft() for _ in range(need)]

    def free(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

    def write(self, pages: list[int], features: torch.Tensor) -> None:
        for i, page in enumerate(pages):
            part = features[i * PAGE_ROWS:(i + 1) * PAGE_ROWS]
            self.store[page * PAGE_ROWS: page * PAGE_ROWS + part.shape[0]] = part

    def read(self, pages: list[int], rows: int) -> torch.Tensor:
        parts = [self.store[p * PAGE_ROWS:(p + 1) * PAGE_ROWS] for p in pages]
        return torch.cat(parts)[:rows]


@dataclass
class MediaItem:
    payload: bytes
    kind: str
    rows: int
    pages: Optional[list[int]] = None
    mask_pages: Optional[list[int]] = None
    digest: str = ""


@dataclass
class MediaRequest:
    rid: str
    items: list[MediaItem] = field(default_factory=list)
    prefix_pages: Optional[list[int]] = None
    aborted: bool = False


class FeatureCache:
    """Owns the pages that are put into it; evicts the oldest entries."""

    def __init__(self, pages: FeaturePages, limit: int) -> None:
        self._pages = pages
        self._entries: "OrderedDict[str, list[int]]" = OrderedDict()
        self._limit = limit

    def holds(self, digest: str) -> bool:
        return digest in self._entries

    def adopt(self, digest: str, pages: list[int]) -> None:
        old = self._entries.pop(digest, None)
        if old is not None:
            self._pages.free(old)
        self._entries[digest] = pages
        while len(self._entries) > self._limit:
            _, evicted = self._entries.popitem(last=False)
            self._pages.free(evicted)

    def flush(self) -> None:
        for pages in self._entries.values():
            self._pages.free(pages)
        self._entries.clear()


class MediaEncoder:
    def __init__(self, pages: FeaturePages, cache: FeatureCache, vision, audio) -> None:
        self.pages = pages
        self.cache = cache
        self.vision = vision
        self.audio = audio
        self.requests: dict[str, MediaRequest] = {}
        self.refused = 0

    def _tower(self, kind: str):
        return self.vision if kind == "image" else self.audio

    def encode_into_cache(self, item: MediaItem) -> bool:
        item.digest = hashlib.sha256(item.payload).hexdigest()
        if self.cache.holds(item.digest):
            return True
        pages = self.pages.alloc(item.rows)  # clean: adopted by the cache, which frees on eviction
        if pages is None:
            self.refused += 1
            return False
        self.pages.write(pages, self._tower(item.kind)(item.payload))
        self.cache.adopt(item.digest, pages)
        return True

    def admit(self, request: MediaRequest, prefix_rows: int) -> bool:
        prefix = self.pages.alloc(prefix_rows)  # clean: freed where an item does not fit, else kept in the request
        if prefix is None:
            return False
        for item in request.items:
            item.pages = self.pages.alloc(item.rows)  # clean: near miss, undone by _unplace, freed by finish
            if item.pages is None:
                self._unplace(request.items)
                self.pages.free(prefix)
                return False
        request.prefix_pages = prefix
        self.requests[request.rid] = request
        return True

    def _unplace(self, items: list[MediaItem]) -> None:
        for item in items:
            if item.pages is not None:
                self.pages.free(item.pages)
                item.pages = None
            if item.mask_pages is not None:
                self.pages.free(item.mask_pages)
                item.mask_pages = None

    def finish(self, rid: str) -> None:
        request = self.requests.pop(rid, None)
        if request is None:
            return
        self._unplace(request.items)
        if request.prefix_pages is not None:
            self.pages.free(request.prefix_pages)
            request.prefix_pages = None

    def extend_prefix(self, rid: str, rows: int) -> bool:
        request = self.requests[rid]
        longer = self.pages.alloc(rows)  # clean: near miss, the shorter pages are freed after the move
        if longer is None:
            return False
        shorter = request.prefix_pages or []
        self.pages.write(longer, self.pages.read(shorter, rows) if shorter else self.pages.store[:0])
        request.prefix_pages = longer
        self.pages.free(shorter)
        return True

    def truncate(self, rid: str, index: int, rows: int) -> bool:
        """Re-encodes one item with fewer rows."""
        item = self.requests[rid].items[index]
        kept = item.pages
        smaller = self.pages.alloc(rows)  # leak: not freed where the item turns out to be small already
        if smaller is None:
            return False
        if kept is not None and len(kept) <= len(smaller):
            return True
        self.pages.write(smaller, self._tower(item.kind)(item.payload)[:rows])
        item.pages = smaller
        item.rows = rows
        if kept is not None:
            self.pages.free(kept)
        return True

    def pair(self, left: MediaItem, right: MediaItem) -> bool:
        a = self.pages.alloc(left.rows)  # leak: kept when there is no room for the right item
        b = self.pages.alloc(right.rows)  # clean: freed when the left item did not fit, else moved into the item
        if a is None or b is None:
            if b is not None:
                self.pages.free(b)
            return False
        self.pages.write(a, self.vision(left.payload))
        self.pages.write(b, self.vision(right.payload))
        self.cache.adopt(hashlib.sha256(left.payload).hexdigest(), a)
        self.cache.adopt(hashlib.sha256(right.payload).hexdigest(), b)
        return True


class EncodeQueue:
    """Work that waits for a tower, with its pages already placed."""

    def __init__(self, pages: FeaturePages) -> None:
        self.pages = pages
        self._waiting: Deque[tuple[MediaItem, list[int]]] = deque()
        self._late: list[tuple[str, list[int]]] = []

    def push(self, item: MediaItem) -> bool:
        pages = self.pages.alloc(item.rows)  # clean: near miss, freed by step() or cancel()
        if pages is None:
            return False
        self._waiting.append((item, pages))
        return True

    def step(self, cache: FeatureCache, tower) -> bool:
        if not self._waiting:
            return False
        item, pages = self._waiting.popleft()
        if not item.payload:
            self.pages.free(pages)
            return False
        self.pages.write(pages, tower(item.payload))
        cache.adopt(item.digest, pages)
        return True

    def cancel(self) -> int:
        count = len(self._waiting)
        while self._waiting:
            _, pages = self._waiting.pop()
            self.pages.free(pages)
        return count

    def push_late(self, digest: str, rows: int) -> bool:
        pages = self.pages.alloc(rows)  # leak: drop_late() clears the list and frees nothing
        if pages is None:
            return False
        self._late.append((digest, pages))
        return True

    def drop_late(self) -> list[str]:
        digests = [digest for digest, _ in self._late]
        self._late.clear()
        return digests
