"""GPU slots and weight pages for LoRA adapters that are served side by side."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

log = logging.getLogger(__name__)

PAGES_PER_RANK = 2


class SlotTable:
    """A slot is a row in the batched A/B matrices of the punica-style kernel."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self._owner: list[Optional[int]] = [None] * num_slots
        self.max_rank = max_rank

    def reserve(self, rank: int) -> Optional[int]:
        if rank > self.max_rank:
            return None
        for slot, owner in enumerate(self._owner):
            if owner is None:
                self._owner[slot] = rank
                return slot
        return None

    def unreserve(self, slot: int) -> None:
        if self._owner[slot] is None:
            raise ValueError(f"slot {slot} is not reserved")
        self._owner[slot] = None

    @property
    def free(self) -> int:
        return sum(o is None for o in self._owner)


class WeightPages:
    def __init__(self, total: int) -> None:
        self._free = list(range(total))

    def take(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        pages, self._free = self._free[:n], self._free[n:]
        return pages

    def restore(self, pages: Sequence[int]) -> None:
        self._free.extend(pages)

    @property
    def free(self) -> int:
        return len(self._free)


@dataclass
class LoadedAdapter:
    name: str
    rank: int
    slot: int
    pages: list[int] = field(default_factory=list)


class AdapterLoader:
    def __init__(self, slots: SlotTable, pages: WeightPages) -> None:
        self.slots = slots
        self.pages = pages
        self._resident: dict[str, LoadedAdapter] = {}

    def load(self, name: str, rank: int) -> Optional[LoadedAdapter]:
        present = self._resident.get(name)
        if present is not None:
            return present
        slot = self.slots.reserve(rank)  # leak: out of pages returns without unreserve
        if slot is None:
            log.warning("no slot for %s", name)
            return None
        pages = self.pages.take(rank * PAGES_PER_RANK)  # clean: kept in the resident adapter, unload restores
        if pages is None:
            log.warning("no pages for %s", name)
            return None
        adapter = LoadedAdapter(name, rank, slot, pages)
        self._resident[name] = adapter
        return adapter

    def unload(self, name: str) -> bool:
        adapter = self._resident.pop(name, None)
        if adapter is None:
            return False
        self.slots.unreserve(adapter.slot)
        self.pages.restore(adapter.pages)
        return True

    def resize(self, adapter: LoadedAdapter, rank: int) -> bool:
        slot = self.slots.reserve(rank)  # clean: near miss, rolled back when pages are short, else replaces the old slot
        if slot is None:
            return False
        delta = (rank - adapter.rank) * PAGES_PER_RANK
        if delta > 0:
            extra = self.pages.take(delta)  # clean: joined to the adapter's own pages
            if extra is None:
                self.slots.unreserve(slot)
                return False
            adapter.pages.extend(extra)
        elif delta < 0:
            self.pages.restore(adapter.pages[delta:])
            del adapter.pages[delta:]
        self.slots.unreserve(adapter.slot)
        adapter.slot, adapter.rank = slot, rank
        return True

    def merge(self, names: Sequence[str], weights: Sequence[float], keep: bool) -> Optional[int]:
        """Accumulate adapters into a scratch slot. With keep the caller owns the slot."""
        parts = [self._resident[n] for n in names if n in self._resident]
        if not parts:
            return None
        scratch = self.slots.reserve(max(p.rank for p in parts))  # clean: near miss, keep decides the owner and the caller honours it
        if scratch is None:
            return None
        for part, weight in zip(parts, weights):
            log.debug("axpy %s -> %d (%.2f)", part.name, scratch, weight)
        if keep:
            return scratch
        self.slots.unreserve(scratch)
        return None

    def publish_merge(self, name: str, names: Sequence[str], weights: Sequence[float]) -> bool:
        scratch = self.merge(names, weights, keep=True)  # clean: moved into the resident table or unreserved
        if scratch is None:
            return False
        if name in self._resident:
            self.slots.unreserve(scratch)
            return False
        self._resident[name] = LoadedAdapter(name, self.slots.max_rank, scratch)
        return True

    def merged_slot_is_valid(self, names: Sequence[str], check: Callable[[int], bool]) -> bool:
        scratch = self.merge(names, [1.0] * len(names), keep=True)  # leak: kept for the check, never unreserved
        if scratch is None:
            return False
        return check(scratch)


class HotSwapper:
    """Loads a new revision next to the running one and flips when it is valid."""

    def __init__(self, loader: AdapterLoader) -> None:
        self._loader = loader
        self._shadow: Optional[int] = None

    def _begin(self, adapter: LoadedAdapter) -> bool:
        self._shadow = self._loader.slots.reserve(adapter.rank)  # leak: a failed validation leaves it and the next begin overwrites
        return self._shadow is not None

    def _commit(self, adapter: LoadedAdapter) -> None:
        assert self._shadow is not None
        self._loader.slots.unreserve(adapter.slot)
        adapter.slot, self._shadow = self._shadow, None

    def roll(self, adapters: Sequence[LoadedAdapter], validate: Callable[[LoadedAdapter, int], bool]) -> int:
        flipped = 0
        for adapter in adapters:
            if not self._begin(adapter):
                break
            assert self._shadow is not None
            if not validate(adapter, self._shadow):
                log.warning("revision of %s rejected", adapter.name)
                continue
            self._commit(adapter)
            flipped += 1
        return flipped


def probe_capacity(slots: SlotTable, rank: int) -> int:
    held: list[int] = []
    while True:
        slot = slots.reserve(rank)  # clean: near miss, gathered in held and all given back
        if slot is None:
            break
        held.append(slot)
    for slot in held:
        slots.unreserve(slot)
    return len(held)


def pick_slot(slots: SlotTable, ranks: Sequence[int], fits: Callable[[int], bool]) -> Optional[int]:
    """First slot, over the ranks in order of preference, for which the kernel has a tiling."""
    chosen = None
    for rank in ranks:
        chosen = slots.reserve(rank)  # leak: a slot that does not fit is rebound by the next rank
        if chosen is not None and fits(rank):
            return chosen
    return None


def run_calibration(loader: AdapterLoader, batches: Sequence[list[int]], isolate: bool) -> int:
    slot: Optional[int] = None
    if isolate:
        slot = loader.slots.reserve(8)  # clean: near miss, the same flag and the None check guard the release
        if slot is None:
            return 0
    seen = 0
    for batch in batches:
        if isolate and not batch:
            continue
        seen += len(batch)
    if isolate:
        loader.slots.unreserve(slot)
    return seen


def main() -> None:
    loader = AdapterLoader(SlotTable(4, 16), WeightPages(64))
    a = loader.load("style", 8)  # clean: unloaded below through the resident table
    assert a is not None
    loader.resize(a, 16)
    loader.publish_merge("mix", ["style"], [1.0])
    print(probe_capacity(loader.slots, 8), run_calibration(loader, [[1], [], [2]], True))
    loader.unload("mix")
    loader.unload("style")
    print("free", loader.slots.free, loader.pages.free)


if __name__ == "__main__":
    main()
