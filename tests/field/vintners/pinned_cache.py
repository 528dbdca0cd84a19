"""Cache of parameter shards in pinned memory, with pin counts and LRU eviction."""
from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Dict, Hashable, Iterator, List, Optional, Tuple

import torch

Loader = Callable[[Hashable], torch.Tensor]


@dataclass(eq=False)
class Entry:
    key: Hashable
    tensor: torch.Tensor
    pins: int = 0
    dirty: bool = False


class ShardCache:
    """get_pinned() makes an entry unevictable until unpin()."""

    def __init__(self, capacity: int, load: Loader, store: Callable[[Hashable, torch.Tensor], None]) -> None:
        self.capacity = capacity
        self._load = load
        self._store = store
        self._lru: "OrderedDict[Hashable, Entry]" = OrderedDict()
        self._mu = threading.RLock()

    def get_pinned(self, key: Hashable) -> Entry:
        with self._mu:
            entry = self._lru.get(key)
            if entry is None:
                self._make_room()
                entry = Entry(key, self._load(key).pin_memory())
                self._lru[key] = entry
            self._lru.move_to_end(key)
            entry.pins += 1
            return entry

    def pin_if_cached(self, key: Hashable) -> Optional[Entry]:
        with self._mu:
            entry = self._lru.get(key)
            if entry is not None:
                entry.pins += 1
            return entry

    def unpin(self, entry: Entry, dirty: bool = False) -> None:
        with self._mu:
            entry.dirty |= dirty
            entry.pins -= 1

    def _make_room(self) -> None:
        while len(self._lru) >= self.capacity:
            victim = next((e for e in self._lru.values() if e.pins == 0), None)
            if victim is None:
                raise RuntimeError("every cached shard is pinned")
            if victim.dirty:
                self._store(victim.key, victim.tensor)
            del self._lru[victim.key]

    def flush(self) -> int:
        n = 0
        with self._mu:
            keys = [e.key for e in self._lru.values() if e.dirty]
        for key in keys:
            entry = self.pin_if_cached(key)  # leak: an entry cleaned meanwhile is skipped while pinned
            if entry is None:
                continue
            if not entry.dirty:
                continue
            self._store(key, entry.tensor)
            entry.dirty = False
            self.unpin(entry)
            n += 1
        return n

    @contextmanager
    def pinned(self, key: Hashable) -> Iterator[torch.Tensor]:
        entry = self.get_pinned(key)  # clean: unpinned in finally
        try:
            yield entry.tensor
        finally:
            self.unpin(entry)


class LayerWindow:
    """Keeps the shards of the layers around the current one pinned."""

    def __init__(self, cache: ShardCache, radius: int, n_layers: int) -> None:
        self.cache = cache
        self.radius = radius
        self.n_layers = n_layers
        self._held: Dict[int, Entry] = {}

    def move_to(self, layer: int) -> None:
        lo, hi = max(layer - self.radius, 0), min(layer + self.radius, self.n_layers - 1)
        for i in [i for i in self._held if not lo <= i <= hi]:
            self.cache.unpin(self._held.pop(i))
        for i in range(lo, hi + 1):
            if i not in self._held:
                self._held[i] = self.cache.get_pinned(("layer", i))  # clean: near miss, unpinned on leaving

    def tensor(self, layer: int) -> torch.Tensor:
        return self._held[layer].tensor

    def close(self) -> None:
        while self._held:
            self.cache.unpin(self._held.popitem()[1])


class TiedEmbedding:
    """Input and output embedding share a shard; both ends pin it."""

    def __init__(self, cache: ShardCache, key: Hashable) -> None:
        self.cache = cache
        self.source = cache.get_pinned(key)  # clean: release() unpins it
        self.target = cache.get_pinned(key)  # leak: release() unpins the source only

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self.source.tensor[ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.target.tensor.T

    def release(self) -> None:
        self.cache.unpin(self.source)
        self.source = self.target = None


class MaybeOwned:
    """An entry that is unpinned by us if `owns` says so; borrowed ones belong to somebody else."""

    def __init__(self, cache: ShardCache, entry: Entry, owns: bool) -> None:
        self.cache = cache
        self.entry = entry
        self.owns = owns

    def done(self) -> None:
        if self.owns:
            self.cache.unpin(self.entry)


def open_shard(cache: ShardCache, window: LayerWindow, layer: int) -> MaybeOwned:
    held = window._held.get(layer)
    if held is not None:
        return MaybeOwned(cache, held, owns=False)
    entry = cache.get_pinned(("layer", layer))  # clean: near miss, the handle owns it and done() unpins
    return MaybeOwned(cache, entry, owns=True)


def view_shard(cache: ShardCache, key: Hashable) -> MaybeOwned:
    entry = cache.get_pinned(key)  # leak: wrapped as borrowed, so done() leaves the pin
    return MaybeOwned(cache, entry, owns=False)


def layer_norms(cache: ShardCache, window: LayerWindow, layers: List[int]) -> Dict[int, float]:
    out = {}
    for layer in layers:
        shard = open_shard(cache, window, layer)  # clean: done() in the same turn
        out[layer] = float(shard.entry.tensor.norm())
        shard.done()
    return out


def apply_sparse(cache: ShardCache, key: Hashable, rows: torch.Tensor, delta: torch.Tensor) -> int:
    entry = cache.get_pinned(key)  # leak: no rows, no unpin
    if rows.numel() == 0:
        return 0
    entry.tensor.index_add_(0, rows, delta)
    cache.unpin(entry, dirty=True)
    return int(rows.numel())


def interpolate(cache: ShardCache, a: Hashable, b: Hashable, w: float) -> torch.Tensor:
    with cache.pinned(a) as ta, cache.pinned(b) as tb:  # clean: both managers unpin
        return torch.lerp(ta, tb, w).clone()


def closest(cache: ShardCache, keys: List[Hashable], ref: torch.Tensor) -> Optional[Tuple[Hashable, float]]:
    """The key whose shard is nearest to ref; the best one so far stays pinned while searching."""
    best: Optional[Entry] = None
    best_d = float("inf")
    for k in keys:
        entry = cache.get_pinned(k)  # leak: a better one replaces best without unpinning it
        d = float((entry.tensor - ref).norm())
        if d < best_d:
            best, best_d = entry, d
        else:
            cache.unpin(entry)
    if best is None:
        return None
    cache.unpin(best)
    return best.key, best_d


def farthest(cache: ShardCache, keys: List[Hashable], ref: torch.Tensor) -> Optional[Tuple[Hashable, float]]:
    best: Optional[Entry] = None
    best_d = -1.0
    for k in keys:
        entry = cache.get_pinned(k)  # clean: near miss, the replaced best is unpinned
        d = float((entry.tensor - ref).norm())
        if d <= best_d:
            cache.unpin(entry)
            continue
        if best is not None:
            cache.unpin(best)
        best, best_d = entry, d
    if best is None:
        return None
    cache.unpin(best)
    return best.key, best_d
