"""Encoder output cache for image and video inputs.

Rows of a preallocated slab hold projected vision tokens.  Entries are keyed by
content hash, pinned while a request still has placeholder tokens to prefill and
evicted in LRU order once unpinned.
"""
from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

log = logging.getLogger(__name__)


class EmbedSlab:
    """Fixed rows of [max_tokens, hidden]; a lease is a row index."""

    def __init__(self, rows: int, max_tokens: int, hidden: int, device: str = "cuda"):
        self.store = torch.empty(rows, max_tokens, hidden, dtype=torch.bfloat16, device=device)
        self.max_tokens = max_tokens
        self._idle = list(range(rows))
        self._mu = threading.Lock()

    def checkout(self) -> int | None:
        with self._mu:
            if not self._idle:
                return None
            return self._idle.pop()  # clean: returned to the caller

    def checkout_many(self, n: int) -> list[int] | None:
        rows: list[int] = []
        with self._mu:
            for _ in range(n):
                if not self._idle:
                    return None
                rows.append(self._idle.pop())  # leak: rows popped so far are dropped when the slab runs dry
        return rows

    def checkin(self, row: int) -> None:
        with self._mu:
            self._idle.append(row)

    def checkin_all(self, rows) -> None:
        with self._mu:
            self._idle.extend(rows)

    def view(self, row: int, tokens: int) -> torch.Tensor:
        return self.store[row, :tokens]


@dataclass
class Entry:
    key: str
    row: int
    tokens: int
    pins: int = 0


@dataclass
class MediaItem:
    kind: str
    pixels: torch.Tensor
    entry: Entry | None = None

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.pixels.numpy().tobytes(), digest_size=16).hexdigest()


@dataclass
class MMRequest:
    rid: str
    items: list[MediaItem] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    frame_rows: list[int] = field(default_factory=list)


class EncoderCache:
    def __init__(self, slab: EmbedSlab, tower):
        self.slab = slab
        self.tower = tower
        self.entries: OrderedDict[str, Entry] = OrderedDict()

    def _evict_one(self) -> bool:
        for key, entry in self.entries.items():
            if entry.pins == 0:
                del self.entries[key]
                self.slab.checkin(entry.row)
                return True
        return False

    def _reserve_row(self) -> int | None:
        row = self.slab.checkout()  # clean: returned, or None and nothing was taken
        while row is None and self._evict_one():
            row = self.slab.checkout()  # clean: near miss, rebinds only while row is None
        return row

    def lookup_or_encode(self, item: MediaItem) -> Entry | None:
        key = item.digest
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
            entry.pins += 1
            return entry
        row = self._reserve_row()  # leak: kept out of the slab when the item has too many tokens
        if row is None:
            return None
        embeds = self.tower(item.pixels)
        tokens = embeds.shape[0]
        if tokens > self.slab.max_tokens:
            log.warning("item %s yields %d tokens, skipping cache", key, tokens)
            return None
        self.slab.view(row, tokens).copy_(embeds)
        entry = Entry(key, row, tokens, pins=1)
        self.entries[key] = entry
        return entry

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1


class MediaBinder:
    """Attaches cache entries to requests before they are scheduled."""

    def __init__(self, cache: EncoderCache, max_items: int = 16):
        self.cache = cache
        self.max_items = max_items

    def bind(self, req: MMRequest) -> bool:
        for item in req.items:
            entry = self.cache.lookup_or_encode(item)  # clean: near miss, stored on the request and unbound on failure
            if entry is None:
                self.unbind(req)
                return False
            req.entries.append(entry)
        return True

    def unbind(self, req: MMRequest) -> None:
        while req.entries:
            self.cache.unpin(req.entries.pop())
        if req.frame_rows:
            self.cache.slab.checkin_all(req.frame_rows)
            req.frame_rows = []

    def bind_pair(self, left: MediaItem, right: MediaItem) -> bool:
        first = self.cache.lookup_or_encode(left)  # leak: stays pinned when the right item cannot be cached
        if first is None:
            return False
        second = self.cache.lookup_or_encode(right)  # clean: stored on the item, release_pair unpins it
        if second is None:
            return False
        left.entry, right.entry = first, second
        return True

    def release_pair(self, left: MediaItem, right: MediaItem) -> None:
        for item in (left, right):
            if item.entry is not None:
                self.cache.unpin(item.entry)
                item.entry = None

    def bind_video(self, req: MMRequest, frames: list[torch.Tensor]) -> bool:
        rows = self.cache.slab.checkout_many(len(frames))  # clean: kept in req.frame_rows, which unbind checks in
        if rows is None:
            return False
        req.frame_rows.extend(rows)
        for row, frame in zip(rows, frames):
            emb = self.cache.tower(frame)
            self.cache.slab.view(row, emb.shape[0]).copy_(emb)
        return True

    def token_budget(self, items: list[MediaItem]) -> int:
        total = 0
        for item in items[: self.max_items]:
            entry = self.cache.lookup_or_encode(item)  # leak: audio items continue without unpinning
            if entry is None:
                continue
            if item.kind == "audio":
                total += entry.tokens // 4
                continue
            total += entry.tokens
            self.cache.unpin(entry)
        return total
