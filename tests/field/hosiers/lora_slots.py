"""LoRA adapter manager: GPU adapter slots, pinned host copies and per-batch activation."""
from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional


@dataclass
class Adapter:
    name: str
    rank: int
    path: str
    scaling: float = 1.0
    slot: int = -1


class SlotTable:
    """Fixed number of adapter slots in the stacked LoRA weight tensors."""

    def __init__(self, n: int) -> None:
        self._free = list(range(n - 1, -1, -1))
        self._owner: dict[int, str] = {}

    def claim(self, name: str) -> int:
        if not self._free:
            return -1
        slot = self._free.pop()
        self._owner[slot] = name
        return slot

    def vacate(self, slot: int) -> None:
        if self._owner.pop(slot, None) is not None:
            self._free.append(slot)


class HostCache:
    """Adapters in host memory; an entry with pins cannot be evicted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[str, Adapter] = OrderedDict()
        self._pins: dict[str, int] = {}
        self._mu = threading.Lock()

    def pin(self, name: str) -> Optional[Adapter]:
        with self._mu:
            ad = self._entries.get(name)
            if ad is None:
                return None
            self._pins[name] = self._pins.get(name, 0) + 1
            self._entries.move_to_end(name)
            return ad

    def unpin(self, name: str) -> None:
        with self._mu:
            left = self._pins[name] - 1
            if left:
                self._pins[name] = left
            else:
                del self._pins[name]

    def put(self, ad: Adapter) -> None:
        with self._mu:
            self._entries[ad.name] = ad
            for name in list(self._entries):
                if len(self._entries) <= self.limit:
                    break
                if name not in self._pins and name != ad.name:
                    del self._entries[name]


class AdapterManager:
    def __init__(self, host: HostCache, slots: SlotTable, copier) -> None:
        self.host = host
        self.slots = slots
        self.copier = copier
        self.active: dict[str, int] = {}
        self.static: dict[str, Adapter] = {}

    def max_rank(self, names: list[str], cap: int) -> int:
        best = 0
        for name in names:
            ad = self.host.pin(name)  # leak: the continue for oversized ranks skips the unpin
            if ad is None:
                continue
            if ad.rank > cap:
                continue
            best = max(best, ad.rank)
            self.host.unpin(name)
        return best

    def activate(self, name: str) -> bool:
        if name in self.active:
            return True
        ad = self.host.pin(name)  # leak: not unpinned when no slot is free
        if ad is None:
            return False
        slot = self.slots.claim(name)  # clean: kept in active, vacated by deactivate
        if slot < 0:
            return False
        self.copier(ad, slot)
        self.active[name] = slot
        self.host.unpin(name)
        return True

    def deactivate(self, name: str) -> None:
        slot = self.active.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)

    def replace(self, old: str, new: str) -> bool:
        if new in self.active:
            return True
        slot = self.slots.claim(new)  # clean: near miss, the rollback covers the missing adapter
        if slot < 0:
            self.deactivate(old)
            slot = self.slots.claim(new)  # clean: near miss, stored in active or vacated below
            if slot < 0:
                return False
        ad = self.host.pin(new)  # clean: unpinned after the copy, None needs nothing
        if ad is None:
            self.slots.vacate(slot)
            return False
        self.copier(ad, slot)
        self.host.unpin(new)
        self.active[new] = slot
        return True

    def preload(self, names: list[str]) -> int:
        """Static adapters stay pinned until clear_static."""
        done = 0
        for name in names:
            if name in self.static:
                continue
            ad = self.host.pin(name)  # clean: held in static, clear_static unpins every entry
            if ad is not None:
                self.static[name] = ad
                done += 1
        return done

    def clear_static(self) -> None:
        while self.static:
            name, _ = self.static.popitem()
            self.host.unpin(name)

    @contextmanager
    def borrowed(self, name: str) -> Iterator[Optional[Adapter]]:
        ad = self.host.pin(name)  # clean: finally unpins whatever was pinned
        try:
            yield ad
        finally:
            if ad is not None:
                self.host.unpin(name)

    @contextmanager
    def scratch_slot(self, name: str) -> Iterator[int]:
        slot = self.slots.claim(name)  # leak: only merged adapters vacate the slot after the body
        yield slot
        if slot >= 0 and name.startswith("merged/"):
            self.slots.vacate(slot)


class BatchAdapters:
    """Adapters used by one running batch."""

    def __init__(self, mgr: AdapterManager) -> None:
        self.mgr = mgr
        self.pinned: list[str] = []
        self.by_row: dict[int, str] = {}

    def add(self, row: int, name: str) -> None:
        if name in self.pinned:
            self.by_row[row] = name
            return
        ad = self.mgr.host.pin(name)  # clean: finish unpins all the names in pinned
        if ad is None:
            return
        self.pinned.append(name)
        self.by_row[row] = name

    def finish(self) -> None:
        for name in self.pinned:
            self.mgr.host.unpin(name)
        self.pinned = []
        self.by_row.clear()


class RowAdapters:
    """Row-wise variant for the graph runner: one pin per row."""

    def __init__(self, host: HostCache) -> None:
        self.host = host
        self.rows: dict[int, str] = {}

    def bind(self, row: int, name: str) -> bool:
        if self.host.pin(name) is None:  # leak: reset clears the rows without unpinning
            return False
        self.rows[row] = name
        return True

    def unbind(self, row: int) -> None:
        name = self.rows.pop(row, None)
        if name is not None:
            self.host.unpin(name)

    def reset(self) -> None:
        """Called after the graphs are captured again: all rows start empty."""
        self.rows.clear()


def validate(mgr: AdapterManager, names: list[str], supported: set[int]) -> list[str]:
    bad = []
    for name in names:
        with mgr.borrowed(name) as ad:  # clean: near miss, the continue leaves through the with
            if ad is None or ad.rank in supported:
                continue
            bad.append(name)
    return bad


def swap_pair(mgr: AdapterManager, a: str, b: str) -> tuple[int, int]:
    sa = mgr.slots.claim(a)  # leak: the second failure vacates nothing
    if sa < 0:
        return -1, -1
    sb = mgr.slots.claim(b)  # clean: kept in active with the first
    if sb < 0:
        return -1, -1
    mgr.active[a] = sa
    mgr.active[b] = sb
    return sa, sb
