"""Vision encoder outputs: a budget of embedding rows, pinned cache entries, and scratch from an arena."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

import torch

log = logging.getLogger("mm.cache")


class RowBudget:
    """Rows are counted only; a Grant must be settled."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.granted = 0

    def request(self, rows: int) -> Optional["Grant"]:
        if self.granted + rows > self.rows:
            return None
        self.granted += rows
        return Grant(self, rows)


@dataclass
class Grant:
    owner: RowBudget
    rows: int
    settled: bool = False

    def settle(self) -> None:
        if not self.settled:
            self.settled = True
            self.owner.granted -= self.rows


@dataclass
class Entry:
    key: str
    value: torch.Tensor
    grant: Grant
    users: int = 0


class EncoderCache:
    def __init__(self, budget: RowBudget) -> None:
        self.budget = budget
        self._entries: dict[str, Entry] = {}

    def acquire(self, key: str) -> Optional[Entry]:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.users += 1
        return entry

    def release(self, entry: Entry) -> None:
        entry.users -= 1

    def put(self, key: str, value: torch.Tensor, grant: Grant) -> Entry:
        """The cache owns the grant from here on; the entry comes back in use."""
        old = self._entries.pop(key, None)
        if old is not None:
            old.grant.settle()
        entry = Entry(key, value, grant, users=1)
        self._entries[key] = entry
        return entry

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def shrink(self, rows: int) -> int:
        freed = 0
        for key in [k for k, e in self._entries.items() if e.users == 0]:
            if freed >= rows:
                break
            entry = self._entries.pop(key)
            entry.grant.settle()
            freed += entry.grant.rows
        return freed

    def invalidate(self, prefix: str) -> int:
        dead = [k for k in self._entries if k.startswith(prefix) and self._entries[k].users == 0]
        for key in dead:
            self._entries.pop(key).grant.settle()
        return len(dead)


@dataclass
class MultiModalRequest:
    rid: str
    images: list[tuple[str, torch.Tensor]]
    entries: list[Entry] = field(default_factory=list)
    draft: Optional[Grant] = None
    text_only: bool = False


class EncoderStage:
    def __init__(self, cache: EncoderCache, encode: Callable[[torch.Tensor], torch.Tensor],
                 rows_per_image: int) -> None:
        self.cache = cache
        self.encode = encode
        self.rows = rows_per_image
        self.requests: dict[str, MultiModalRequest] = {}

    def _grant(self, rows: int) -> Optional[Grant]:
        grant = self.cache.budget.request(rows)  # clean: handed on, or None
        if grant is None and self.cache.shrink(rows) >= rows:
            grant = self.cache.budget.request(rows)  # clean: near miss, the first request gave None
        return grant

    def _lookup_or_encode(self, key: str, pixels: torch.Tensor) -> Optional[Entry]:
        entry = self.cache.acquire(key)  # clean: handed on
        if entry is not None:
            return entry
        grant = self._grant(self.rows)  # clean: near miss, becomes the cache's with put
        if grant is None:
            return None
        return self.cache.put(key, self.encode(pixels), grant)  # clean: the entry in use is handed on

    def prepare(self, req: MultiModalRequest) -> bool:
        got: list[Entry] = []
        for key, pixels in req.images:
            entry = self._lookup_or_encode(key, pixels)  # clean: moved to the request, or all released when one is short
            if entry is None:
                for e in got:
                    self.cache.release(e)
                return False
            got.append(entry)
        req.entries = got
        self.requests[req.rid] = req
        return True

    def prepare_partial(self, req: MultiModalRequest) -> int:
        """As many images as fit, the others in a later step."""
        for key, pixels in req.images[len(req.entries):]:
            entry = self._lookup_or_encode(key, pixels)  # leak: an output of the wrong width is left in use
            if entry is None:
                break
            if entry.value.shape[-1] != 4096:
                log.error("%s has width %d", key, entry.value.shape[-1])
                break
            req.entries.append(entry)
        self.requests[req.rid] = req
        return len(req.entries)

    def finish(self, rid: str) -> None:
        req = self.requests.pop(rid, None)
        if req is None:
            return
        for entry in req.entries:
            self.cache.release(entry)
        req.entries.clear()

    def prefetch(self, items: Sequence[tuple[str, torch.Tensor]]) -> int:
        done = 0
        for key, pixels in items:
            grant = self._grant(self.rows)  # leak: a key already cached is skipped with the grant open
            if grant is None:
                break
            if key in self.cache:
                continue
            self.cache.release(self.cache.put(key, self.encode(pixels), grant))  # clean: released at once, stays cached
            done += 1
        return done

    def prefetch_checked(self, items: Sequence[tuple[str, torch.Tensor]]) -> int:
        done = 0
        for key, pixels in items:
            grant = self._grant(self.rows)  # clean: near miss, settled or passed to the cache
            if grant is None:
                break
            value = self.encode(pixels)
            if value.numel() == 0 or key in self.cache:
                grant.settle()
                continue
            self.cache.release(self.cache.put(key, value, grant))  # clean: released at once
            done += 1
        return done

    def similarity(self, a: str, b: str) -> Optional[float]:
        left = self.cache.acquire(a)  # leak: not released when b is absent
        if left is None:
            return None
        right = self.cache.acquire(b)  # clean: released after the comparison
        if right is None:
            return None
        score = float(torch.nn.functional.cosine_similarity(left.value.mean(0), right.value.mean(0), dim=0))
        self.cache.release(left)
        self.cache.release(right)
        return score

    def embedding(self, key: str) -> Optional[torch.Tensor]:
        entry = self.cache.acquire(key)  # leak: the value is cloned out and the entry stays in use
        return entry.value.clone() if entry is not None else None

    def mean_embedding(self, key: str) -> Optional[torch.Tensor]:
        if (entry := self.cache.acquire(key)) is None:  # clean: released in finally
            return None
        try:
            return entry.value.mean(0)
        finally:
            self.cache.release(entry)

    def reserve_draft(self, req: MultiModalRequest, rows: int) -> bool:
        if req.text_only:
            return True
        req.draft = self._grant(rows)  # clean: near miss, drop_draft settles under the same flag
        return req.draft is not None

    def drop_draft(self, req: MultiModalRequest) -> None:
        if req.text_only:
            return
        if req.draft is not None:
            req.draft.settle()
            req.draft = None

    def resize(self, grant: Grant, rows: int) -> Optional[Grant]:
        if rows <= grant.rows:
            return grant
        bigger = self._grant(rows)  # clean: handed back in place of the smaller one
        if bigger is None:
            return None
        grant.settle()
        return bigger

    def encode_video(self, key: str, frames: list[torch.Tensor]) -> bool:
        grant = self._grant(self.rows)  # leak: when resize finds no room None takes the name of the open grant
        if grant is None:
            return False
        grant = self.resize(grant, self.rows * len(frames))  # clean: goes to the cache with put, or None
        if grant is None:
            return False
        value = torch.cat([self.encode(f) for f in frames])
        entry = self.cache.put(key, value, grant)  # clean: released below
        self.cache.release(entry)
        return True
