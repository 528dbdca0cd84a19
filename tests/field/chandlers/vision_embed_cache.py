"""Encoder output cache for image inputs, shared by the prefill workers of one node."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

import torch

logger = logging.getLogger(__name__)


class EmbedSlab:
    """Flat [rows, hidden] storage; an image occupies one row per visual token."""

    def __init__(self, num_rows: int, hidden: int, device: str = "cuda") -> None:
        self._store = torch.empty(num_rows, hidden, dtype=torch.bfloat16, device=device)
        self._free: deque[int] = deque(range(num_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_rows(self, n: int) -> Optional[list[int]]:
        if len(self._free) < n:
            return None
        return [self._free.popleft() for _ in range(n)]

    def put_rows(self, rows: Sequence[int]) -> None:
        self._free.extend(rows)

    def write(self, rows: Sequence[int], embeds: torch.Tensor) -> None:
        self._store[list(rows)] = embeds.to(self._store.dtype)

    def read(self, rows: Sequence[int]) -> torch.Tensor:
        return self._store[list(rows)]


@dataclass
class CacheEntry:
    digest: str
    rows: list[int]
    refs: int = 0


@dataclass
class ImageItem:
    digest: str
    pixels: torch.Tensor


@dataclass
class MMRequest:
    request_id: str
    items: list[ImageItem]
    pinned: dict[int, CacheEntry] = field(default_factory=dict)
    scratch_rows: Optional[list[int]] = None


class EncoderCache:
    def __init__(self, slab: EmbedSlab) -> None:
        self.slab = slab
        self._entries: dict[str, CacheEntry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def pin(self, digest: str) -> Optional[CacheEntry]:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        entry.refs += 1
        self._idle.pop(digest, None)
        return entry

    def unpin(self, entry: CacheEntry) -> None:
        entry.refs -= 1
        if entry.refs == 0:
            self._idle[entry.digest] = None

    def make_room(self, want: int) -> bool:
        while self._idle and self.slab.num_free < want:
            digest, _ = self._idle.popitem(last=False)
            self.slab.put_rows(self._entries.pop(digest).rows)
        return self.slab.num_free >= want

    def admit(self, digest: str, embeds: torch.Tensor) -> Optional[CacheEntry]:
        if not self.make_room(embeds.shape[0]):
            return None
        rows = self.slab.take_rows(embeds.shape[0])  # leak: when another worker admitted the digest first, the fresh rows are dropped
        if rows is None:
            return None
        other = self.pin(digest)  # clean: the pinned entry is handed to the caller
        if other is not None:
            return other
        self.slab.write(rows, embeds)
        entry = CacheEntry(digest, rows, refs=1)
        self._entries[digest] = entry
        return entry


class PrefillAttacher:
    def __init__(self, cache: EncoderCache, encode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.cache = cache
        self.encode = encode

    def attach(self, req: MMRequest) -> bool:
        for idx, item in enumerate(req.items):
            entry = self.cache.pin(item.digest)  # clean: stored in req.pinned, which detach unpins
            if entry is None:
                entry = self.cache.admit(item.digest, self.encode(item.pixels))  # clean: near miss, on None the earlier ones are detached
                if entry is None:
                    self.detach(req)
                    return False
            req.pinned[idx] = entry
        return True

    def detach(self, req: MMRequest) -> None:
        for entry in req.pinned.values():
            self.cache.unpin(entry)
        req.pinned.clear()
        if req.scratch_rows:
            self.cache.slab.put_rows(req.scratch_rows)
            req.scratch_rows = None

    def gather(self, digests: Sequence[str], out: torch.Tensor) -> int:
        filled = 0
        for digest in digests:
            entry = self.cache.pin(digest)  # leak: break upon a full output leaves this entry pinned
            if entry is None:
                continue
            n = len(entry.rows)
            if filled + n > out.shape[0]:
                logger.debug("gather stops at %d rows", filled)
                break
            out[filled:filled + n].copy_(self.cache.slab.read(entry.rows))
            filled += n
            self.cache.unpin(entry)
        return filled

    def token_count(self, digest: str) -> int:
        entry = self.cache.pin(digest)  # clean: near miss, None holds nothing and the other way unpins
        if entry is None:
            return 0
        n = len(entry.rows)
        self.cache.unpin(entry)
        return n

    def warm(self, items: Sequence[ImageItem]) -> int:
        warmed = 0
        for item in items:
            if item.digest in self.cache:
                continue
            entry = self.cache.admit(item.digest, self.encode(item.pixels))  # leak: admit returns it pinned, nobody unpins the warmed entry
            if entry is not None:
                warmed += 1
        return warmed

    def recrop(self, req: MMRequest, idx: int, item: ImageItem) -> bool:
        entry = self.cache.admit(item.digest, self.encode(item.pixels))  # leak: the entry pinned under idx is overwritten without unpin
        if entry is None:
            return False
        req.items[idx] = item
        req.pinned[idx] = entry
        return True

    def replace(self, req: MMRequest, idx: int, item: ImageItem) -> bool:
        entry = self.cache.admit(item.digest, self.encode(item.pixels))  # clean: near miss, the previous entry is popped and unpinned first
        if entry is None:
            return False
        previous = req.pinned.pop(idx, None)
        if previous is not None:
            self.cache.unpin(previous)
        req.items[idx] = item
        req.pinned[idx] = entry
        return True

    def reserve_scratch(self, req: MMRequest, n: int) -> bool:
        if req.scratch_rows is not None:
            return len(req.scratch_rows) >= n
        req.scratch_rows = self.cache.slab.take_rows(n)  # clean: near miss, filled only when empty and detach puts the rows back
        return req.scratch_rows is not None
