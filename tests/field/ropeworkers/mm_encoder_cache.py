"""Multimodal encoder cache. Image embeddings live in rows of one big table; a budget counts them."""
from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

log = logging.getLogger(__name__)


class Span(NamedTuple):
    start: int
    length: int


class RowArena:
    """First-fit allocator over embedding rows; holes are kept sorted by start."""

    def __init__(self, rows: int, dim: int):
        self.table = torch.zeros(rows, dim)
        self.holes: List[Span] = [Span(0, rows)]

    def carve(self, n: int) -> Optional[Span]:
        for i, h in enumerate(self.holes):
            if h.length >= n:
                rest = Span(h.start + n, h.length - n)
                self.holes[i:i + 1] = [rest] if rest.length else []
                return Span(h.start, n)
        return None

    def carve_padded(self, n: int, align: int) -> Optional[Span]:
        """Rows whose start is aligned; the head of the hole stays a hole."""
        span = self.carve(n + align)  # leak: the padding before and after the aligned part never becomes a hole again
        if span is None:
            return None
        start = -(-span.start // align) * align
        return Span(start, n)

    def fill_back(self, span: Span) -> None:
        self.holes.append(span)
        self.holes.sort()
        merged: List[Span] = []
        for h in self.holes:
            if merged and merged[-1].start + merged[-1].length == h.start:
                merged[-1] = Span(merged[-1].start, merged[-1].length + h.length)
            else:
                merged.append(h)
        self.holes = merged

    def view(self, span: Span) -> torch.Tensor:
        return self.table[span.start:span.start + span.length]


class Entry:
    def __init__(self, key: str, span: Span):
        self.key = key
        self.span = span
        self.users = 0
        self.ready = False


class EncoderCache:
    """Content-addressed; entries without users stay until they are evicted."""

    def __init__(self, arena: RowArena):
        self.arena = arena
        self.entries: "OrderedDict[str, Entry]" = OrderedDict()

    def use(self, key: str) -> Optional[Entry]:
        e = self.entries.get(key)
        if e is None:
            return None
        e.users += 1
        self.entries.move_to_end(key)
        return e

    def unuse(self, e: Entry) -> None:
        e.users -= 1

    def reserve(self, key: str, n: int) -> Optional[Entry]:
        """A new entry with one user; the caller has looked the key up before."""
        span = self.arena.carve(n)  # clean: near miss, the second try is made only when this one is None
        while span is None and self._evict():
            span = self.arena.carve(n)  # clean: goes into the entry, which eviction or discard() fills back
        if span is None:
            return None
        e = Entry(key, span)
        e.users = 1
        self.entries[key] = e
        return e

    def discard(self, e: Entry) -> None:
        del self.entries[e.key]
        self.arena.fill_back(e.span)

    def _evict(self) -> bool:
        for key, e in self.entries.items():
            if e.users == 0:
                del self.entries[key]
                self.arena.fill_back(e.span)
                return True
        return False


class VisionRequest:
    def __init__(self, rid: str, images: List[bytes]):
        self.rid = rid
        self.images = images
        self.held: List[Entry] = []


class VisionRunner:
    def __init__(self, tower, cache: EncoderCache, patch_tokens: int, compute_budget: int):
        self.tower = tower
        self.cache = cache
        self.patch_tokens = patch_tokens
        self.compute_left = compute_budget
        self.requests: Dict[str, VisionRequest] = {}

    @staticmethod
    def _key(img: bytes) -> str:
        return hashlib.sha1(img).hexdigest()

    # -- compute budget (one step) ----------------------------------------

    def spend(self, n: int) -> bool:
        if n > self.compute_left:
            return False
        self.compute_left -= n
        return True

    def unspend(self, n: int) -> None:
        self.compute_left += n

    # -- encoding ---------------------------------------------------------

    def ensure(self, img: bytes) -> Optional[Entry]:
        """An entry for the image with a user counted for the caller."""
        key = self._key(img)
        e = self.cache.use(key)  # clean: returned to the caller with its count
        if e is not None:
            return e
        e = self.cache.reserve(key, self.patch_tokens)  # clean: discarded when the tower fails, else returned
        if e is None:
            return None
        try:
            self.cache.arena.view(e.span).copy_(self.tower(img))
        except ValueError:
            log.warning("undecodable image %s", key[:8])
            self.cache.discard(e)
            return None
        e.ready = True
        return e

    def attach(self, req: VisionRequest) -> bool:
        for img in req.images:
            e = self.ensure(img)  # clean: near miss, what was held so far is let go by detach() on failure
            if e is None:
                self.detach(req)
                return False
            req.held.append(e)
        self.requests[req.rid] = req
        return True

    def attach_lazily(self, req: VisionRequest) -> bool:
        """Only takes what is in the cache already."""
        held: List[Entry] = []
        for img in req.images:
            e = self.cache.use(self._key(img))  # leak: earlier entries keep their users when a later image is missing
            if e is None:
                return False
            held.append(e)
        req.held = held
        self.requests[req.rid] = req
        return True

    def detach(self, req: VisionRequest) -> None:
        while req.held:
            self.cache.unuse(req.held.pop())
        self.requests.pop(req.rid, None)

    def replace_image(self, rid: str, pos: int, img: bytes) -> bool:
        req = self.requests[rid]
        e = self.ensure(img)  # clean: takes the place of an entry whose user is uncounted
        if e is None:
            return False
        self.cache.unuse(req.held[pos])
        req.held[pos] = e
        return True

    def crop_image(self, rid: str, pos: int, img: bytes, box: Tuple[int, int]) -> torch.Tensor:
        req = self.requests[rid]
        whole = self.ensure(img)  # leak: the user is not uncounted, the caller gets a clone of some rows
        if whole is None:
            raise LookupError(f"{rid}: image {pos} of {len(req.images)}")
        lo, hi = box
        return self.cache.arena.view(whole.span)[lo:hi].clone()

    def encode_batch(self, imgs: List[bytes]) -> Dict[str, torch.Tensor]:
        out: Dict[str, torch.Tensor] = {}
        for img in imgs:
            if not self.spend(self.patch_tokens):  # clean: near miss, the budget is per step and next_step() restores it whole
                break
            e = self.ensure(img)  # leak: an entry with NaN rows is skipped with its user counted
            if e is None:
                continue
            rows = self.cache.arena.view(e.span)
            if torch.isnan(rows).any():
                log.warning("image %s has NaN rows", e.key[:8])
                continue
            out[e.key] = rows.clone()
            self.cache.unuse(e)
        return out

    def next_step(self, budget: int) -> None:
        self.compute_left = budget

    def gather(self, req: VisionRequest) -> Iterator[torch.Tensor]:
        """Yields embeddings of a request that is not attached, one at a time."""
        for img in req.images:
            e = self.ensure(img)  # clean: uncounted in finally, also when the consumer closes the generator
            if e is None:
                return
            try:
                yield self.cache.arena.view(e.span)
            finally:
                self.cache.unuse(e)

    def pin_tiles(self, tiles: List[bytes], limit: int) -> List[Entry]:
        """Tiles of one high-resolution picture; at most `limit` of them."""
        pinned: List[Entry] = []
        for t in tiles:
            e = self.ensure(t)  # clean: near miss, the slice past the limit is uncounted below
            if e is not None:
                pinned.append(e)
        for extra in pinned[limit:]:
            self.cache.unuse(extra)
        return pinned[:limit]

    def preview(self, tiles: List[bytes]) -> Optional[torch.Tensor]:
        picked = self.pin_tiles(tiles, 4)  # leak: only the first tile is uncounted
        if not picked:
            return None
        out = self.cache.arena.view(picked[0].span).mean(0)
        self.cache.unuse(picked[0])
        return out
