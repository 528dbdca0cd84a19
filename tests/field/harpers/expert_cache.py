"""Device cache of mixture-of-experts weights: slots, pin counts, prefetch and replicas."""
from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Iterable, Iterator

import torch


class SlotTable:
    """Fixed device slots for expert weights."""

    def __init__(self, count: int, shape: tuple[int, ...]):
        self._weights = torch.empty(count, *shape, dtype=torch.bfloat16, device="cuda")
        self._vacant = list(range(count))

    def take(self) -> int | None:
        return self._vacant.pop() if self._vacant else None

    def put(self, slot: int) -> None:
        self._vacant.append(slot)

    def tensor(self, slot: int) -> torch.Tensor:
        return self._weights[slot]


@dataclass
class Resident:
    layer: int
    expert: int
    slot: int
    pins: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.layer, self.expert


class ExpertCache:
    """pin() brings an expert onto the device and holds it there until unpin()."""

    def __init__(self, slots: SlotTable, host: dict[tuple[int, int], torch.Tensor]):
        self.slots = slots
        self.host = host
        self._resident: OrderedDict[tuple[int, int], Resident] = OrderedDict()
        self._mu = threading.RLock()

    def pin(self, layer: int, expert: int) -> Resident | None:
        with self._mu:
            entry = self._resident.get((layer, expert))
            if entry is None:
                entry = self._load(layer, expert)
                if entry is None:
                    return None
            entry.pins += 1
            self._resident.move_to_end(entry.key)
            return entry

    def unpin(self, entry: Resident) -> None:
        with self._mu:
            entry.pins -= 1

    def _load(self, layer: int, expert: int) -> Resident | None:
        slot = self.slots.take()  # clean: near miss, kept by the entry until _evict_one or flush puts it back
        if slot is None:
            if not self._evict_one():
                return None
            slot = self.slots.take()  # clean: near miss, slot was None before
            if slot is None:
                return None
        self.slots.tensor(slot).copy_(self.host[layer, expert], non_blocking=True)
        entry = Resident(layer, expert, slot)
        self._resident[entry.key] = entry
        return entry

    def _evict_one(self) -> bool:
        for key, entry in self._resident.items():
            if entry.pins == 0:
                del self._resident[key]
                self.slots.put(entry.slot)
                return True
        return False

    def flush(self) -> None:
        with self._mu:
            for entry in self._resident.values():
                self.slots.put(entry.slot)
            self._resident.clear()


class ScaleCache:
    """Quantisation scales of experts, bounded by entries."""

    def __init__(self, slots: SlotTable, bound: int):
        self.slots, self.bound = slots, bound
        self._entries: OrderedDict[tuple[int, int], int] = OrderedDict()

    def scales(self, layer: int, expert: int, src: torch.Tensor) -> torch.Tensor | None:
        key = (layer, expert)
        if key in self._entries:
            self._entries.move_to_end(key)
            return self.slots.tensor(self._entries[key])
        slot = self.slots.take()  # leak: eviction past the bound pops the entry and loses its slot
        if slot is None:
            return None
        self.slots.tensor(slot).copy_(src)
        self._entries[key] = slot
        while len(self._entries) > self.bound:
            self._entries.popitem(last=False)
        return self.slots.tensor(slot)

    def clear(self) -> None:
        for slot in self._entries.values():
            self.slots.put(slot)
        self._entries.clear()


class MoELayer:
    def __init__(self, cache: ExpertCache, layer: int, local: list[int], shared: int | None = None):
        self.cache, self.layer, self.local = cache, layer, local
        self.shared: Resident | None = None
        if shared is not None:
            self.shared = cache.pin(layer, shared)  # clean: near miss, pinned for the layer's life, unpinned by teardown

    def forward(self, x: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in self.local:
            entry = self.cache.pin(self.layer, expert)  # leak: an expert without tokens continues while pinned
            if entry is None:
                break
            rows = (topk == expert).any(dim=-1).nonzero().flatten()
            if rows.numel() == 0:
                continue
            weight = self.cache.slots.tensor(entry.slot)
            out.index_add_(0, rows, x[rows] @ weight)
            self.cache.unpin(entry)
        if self.shared is not None:
            out += x @ self.cache.slots.tensor(self.shared.slot)
        return out

    def teardown(self) -> None:
        if self.shared is not None:
            self.cache.unpin(self.shared)
            self.shared = None


class Prefetcher:
    """Pins the experts which the router of the next layer will likely choose."""

    def __init__(self, cache: ExpertCache):
        self.cache = cache
        self.ahead: dict[int, list[Resident]] = defaultdict(list)

    def speculate(self, layer: int, experts: Iterable[int]) -> int:
        self.settle(layer)
        for expert in experts:
            entry = self.cache.pin(layer, expert)  # clean: near miss, unpinned by settle, which finish calls for all layers
            if entry is None:
                break
            self.ahead[layer].append(entry)
        return len(self.ahead[layer])

    def settle(self, layer: int) -> None:
        for entry in self.ahead.pop(layer, []):
            self.cache.unpin(entry)

    def finish(self) -> None:
        for layer in list(self.ahead):
            self.settle(layer)


class HotSet:
    """Experts pinned by frequency; recomputed every few hundred steps."""

    def __init__(self, cache: ExpertCache, size: int):
        self.cache, self.size = cache, size
        self.hits: dict[tuple[int, int], int] = defaultdict(int)
        self.held: dict[tuple[int, int], Resident] = {}

    def observe(self, layer: int, experts: list[int]) -> None:
        for expert in experts:
            self.hits[layer, expert] += 1

    def rebuild(self) -> None:
        ranked = sorted(self.hits, key=self.hits.__getitem__, reverse=True)[: self.size]
        fresh: dict[tuple[int, int], Resident] = {}
        for key in ranked:
            kept = self.held.get(key)
            if kept is not None:
                fresh[key] = kept
                continue
            entry = self.cache.pin(*key)  # leak: one that falls out of the ranking is dropped with the old dict
            if entry is not None:
                fresh[key] = entry
        self.held = fresh
        self.hits.clear()

    def close(self) -> None:
        for entry in self.held.values():
            self.cache.unpin(entry)
        self.held = {}


def replicate(cache: ExpertCache, layer: int, hot: int, cold: int) -> bool:
    """Copies the hot expert over the weights of a cold one."""
    src = cache.pin(layer, hot)  # leak: stays pinned when the cold expert cannot be pinned
    if src is None:
        return False
    dst = cache.pin(layer, cold)  # clean: unpinned with src
    if dst is None:
        return False
    cache.slots.tensor(dst.slot).copy_(cache.slots.tensor(src.slot))
    cache.unpin(dst)
    cache.unpin(src)
    return True


def exchange(cache: ExpertCache, layer: int, a: int, b: int) -> bool:
    left = cache.pin(layer, a)  # clean: unpinned below whenever it was got
    right = cache.pin(layer, b)  # clean: unpinned below whenever it was got
    done = left is not None and right is not None
    if done:
        tmp = cache.slots.tensor(left.slot).clone()
        cache.slots.tensor(left.slot).copy_(cache.slots.tensor(right.slot))
        cache.slots.tensor(right.slot).copy_(tmp)
    for entry in (left, right):
        if entry is not None:
            cache.unpin(entry)
    return done


def walk_experts(cache: ExpertCache, layer: int, experts: Iterable[int]) -> Iterator[torch.Tensor]:
    for expert in experts:
        entry = cache.pin(layer, expert)  # clean: near miss, unpinned in the finally of every turn
        if entry is None:
            return
        try:
            yield cache.slots.tensor(entry.slot)
        finally:
            cache.unpin(entry)


def walk_nonzero(cache: ExpertCache, layer: int, experts: Iterable[int]) -> Iterator[torch.Tensor]:
    for expert in experts:
        entry = cache.pin(layer, expert)  # leak: an expert of zeros ends the generator while pinned
        if entry is None:
            return
        weight = cache.slots.tensor(entry.slot)
        if not weight.any():
            return
        yield weight
        cache.unpin(entry)


def mean_norm(cache: ExpertCache, layer: int, experts: list[int]) -> float:
    norms = [float(w.float().norm()) for w in walk_experts(cache, layer, experts)]
    return sum(norms) / max(1, len(norms))


def first_resident(cache: ExpertCache, layer: int, experts: list[int]) -> Resident | None:
    """A pinned expert out of the given ones; the caller unpins it."""
    for expert in experts:
        entry = cache.pin(layer, expert)  # clean: near miss, returned as soon as one is got
        if entry is not None:
            return entry
    return None


def weight_dtype(cache: ExpertCache, layer: int, experts: list[int]) -> torch.dtype:
    entry = first_resident(cache, layer, experts)  # leak: nothing unpins the entry asked for its dtype
    if entry is None:
        return torch.bfloat16
    return cache.slots.tensor(entry.slot).dtype
