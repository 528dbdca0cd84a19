"""Which key blocks each query block looks at, and the cache of those patterns.

A pattern depends on the settings, the blocks at hand and the device only, so it is computed once for each.
What depends on content is chosen anew in every call and never cached.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from reference_modules.attention.checks import check_whole

_BLOCK_ROWS_AT_ONCE = 256  # so that no (all blocks × all blocks) matrix is ever made


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPattern:
    """The union of four choices among blocks of `block_size` tokens; a query block always sees its own."""

    block_size: int = 64
    local: int = 1
    """Blocks to either side."""
    stride: int | None = None
    """Every stride-th key block, counted back and forth from the query's own."""
    global_blocks: int = 0
    """The first blocks, which see all and are seen by all."""
    content: int = 0
    """Further blocks for each query block and head: those whose mean key its queries fit best."""

    def __post_init__(self) -> None:
        check_whole("block_size", self.block_size, 1)
        if self.stride is not None:
            check_whole("stride", self.stride, 1, ", or None for no strided blocks")
        for name in ("local", "global_blocks", "content"):
            check_whole(name, getattr(self, name), 0)

    def allowed(self, q_blocks: Tensor, k_blocks: Tensor, causal: bool) -> Tensor:
        """(query blocks, key blocks): all but the content's choice, for these block numbers."""
        i, j = q_blocks.unsqueeze(1), k_blocks.unsqueeze(0)
        found = (i - j).abs() <= self.local
        if self.stride is not None:
            found |= (i - j) % self.stride == 0
        if self.global_blocks:
            found |= (i < self.global_blocks) | (j < self.global_blocks)
        return found & (j <= i) if causal else found

    def chosen_by_content(
        self,
        queries_BHQD: Tensor,
        q_blocks: Tensor,
        keys_BHKD: Tensor,
        causal: bool,
        *,
        empty_BK: Tensor,
    ) -> Tensor:
        """(b, h, query blocks, content): numbers of the key blocks, −1 where there are not so many.

        One query and one key stands for each block; `keys` has all blocks, in order; `empty` ones, whose
        keys are all masked, are not worth a choice.
        """
        k_blocks = torch.arange(keys_BHKD.shape[2], device=q_blocks.device)
        most = min(self.content, len(k_blocks))
        found = []
        for rows in _some(len(q_blocks)):
            fit_BHQK = queries_BHQD[:, :, rows] @ keys_BHKD.mT
            taken = self.allowed(q_blocks[rows], k_blocks, causal)
            if causal:
                taken |= k_blocks > q_blocks[rows].unsqueeze(1)
            taken_BHQK = taken | empty_BK[:, None, None]
            best = fit_BHQK.masked_fill(taken_BHQK, -torch.inf).topk(most, -1)
            found.append(best.indices.masked_fill(best.values == -torch.inf, -1))
        return torch.cat(found, 2)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some query blocks and, for each, places among the key blocks at hand; −1 fills up to the longest."""

    blocks: slice
    places: Tensor  # (b or 1, h or 1, query blocks, most)


def static_rows(pattern: BlockPattern, q_blocks: Tensor, k_blocks: Tensor, causal: bool) -> tuple[Rows, ...]:
    """The pattern apart from content, in groups of query blocks with about equally many key blocks."""
    found = []
    for rows in _some(len(q_blocks), first=pattern.global_blocks):
        places = as_places(pattern.allowed(q_blocks[rows], k_blocks, causal))
        if places.shape[-1]:
            found.append(Rows(rows, places[None, None]))
    return tuple(found)


def as_places(allowed: Tensor) -> Tensor:
    """From (..., query blocks, key blocks), True where seen, to (..., query blocks, most) places or −1."""
    most = int(allowed.sum(-1).max()) if allowed.numel() else 0
    order = allowed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
    places: Tensor = order.masked_fill(~allowed.gather(-1, order), -1)
    return places


def _some(count: int, first: int = 0) -> Iterator[slice]:
    """Stretches of limited length; the first ones, which see everything, by themselves."""
    at = 0
    while at < count:
        stop = min(at + _BLOCK_ROWS_AT_ONCE, first if at < first else count, count)
        yield slice(at, stop)
        at = stop


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Since the cache was made, and what it holds now."""

    hits: int
    misses: int
    evictions: int
    entries: int


class PatternCache:
    """Bounded, the least recently used leaves first; safe under threads."""

    def __init__(self, max_entries: int = 64) -> None:
        check_whole("max_entries", max_entries, 1)
        self.max_entries = max_entries
        self._entries: OrderedDict[Hashable, tuple[Rows, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = 0

    def get(self, key: Hashable, compute: Callable[[], tuple[Rows, ...]]) -> tuple[Rows, ...]:
        """What is kept under `key`, else what `compute` gives; two threads may compute, one result stays."""
        with self._lock:
            if key in self._entries:
                self._hits += 1
                self._entries.move_to_end(key)
                return self._entries[key]
            self._misses += 1
        made = compute()
        with self._lock:
            kept = self._entries.setdefault(key, made)
            self._entries.move_to_end(key)
            while len(self._entries) > self.max_entries:
                self._entries.popitem(last=False)
                self._evictions += 1
        return kept

    def stats(self) -> CacheStats:
        """How often it helped."""
        with self._lock:
            return CacheStats(self._hits, self._misses, self._evictions, len(self._entries))

    def clear(self) -> None:
        """Forget all patterns; the counts stay."""
        with self._lock:
            self._entries.clear()


_shared = PatternCache()


def shared_pattern_cache() -> PatternCache:
    """The cache of every module that has none of its own."""
    return _shared
