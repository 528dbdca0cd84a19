"""LoRA adapters of the serving engine: device slots, host copies, users per adapter."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)


class SlotsFull(RuntimeError):
    pass


class AdapterSlots:
    """Rows of the stacked A/B matrices. claim() raises SlotsFull."""

    def __init__(self, count: int, rank: int, dim: int):
        self.a = torch.zeros(count, rank, dim, device="cuda")
        self.b = torch.zeros(count, dim, rank, device="cuda")
        self._free = list(range(count))
        self._lock = threading.Lock()

    def claim(self) -> int:
        with self._lock:
            if not self._free:
                raise SlotsFull
            return self._free.pop()

    def unclaim(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def fill(self, slot: int, weights: Tuple[torch.Tensor, torch.Tensor]) -> None:
        self.a[slot].copy_(weights[0])
        self.b[slot].copy_(weights[1])


class UserCounts:
    """Counted users of an adapter; evictors ask in_use()."""

    def __init__(self):
        self._users: Dict[str, int] = {}

    def add_user(self, name: str) -> None:
        self._users[name] = self._users.get(name, 0) + 1

    def drop_user(self, name: str) -> None:
        self._users[name] -= 1

    def in_use(self, name: str) -> bool:
        return self._users.get(name, 0) > 0


@dataclass
class Entry:
    slot: int
    version: int


class AdapterManager:
    def __init__(self, slots: AdapterSlots, users: UserCounts, store):
        self.slots = slots
        self.users = users
        self.store = store
        self.entries: "OrderedDict[str, Entry]" = OrderedDict()

    def ensure(self, name: str) -> Optional[int]:
        version = self.store.version(name)
        entry = self.entries.get(name)
        if entry is not None and entry.version == version:
            self.entries.move_to_end(name)
            return entry.slot
        try:
            slot = self.slots.claim()  # leak: a new version replaces the entry of the old one
        except SlotsFull:
            if not self._make_room():
                return None
            slot = self.slots.claim()  # leak: the same entry, replaced at the next version
        self.slots.fill(slot, self.store.load(name))
        self.entries[name] = Entry(slot, version)
        return slot

    def _make_room(self) -> bool:
        for name in list(self.entries):
            if not self.users.in_use(name):
                self.slots.unclaim(self.entries.pop(name).slot)
                return True
        return False

    def unload_all(self) -> None:
        for entry in self.entries.values():
            self.slots.unclaim(entry.slot)
        self.entries.clear()


class PinnedAdapters:
    """Adapters which the operator pinned; replacing one keeps its slot."""

    def __init__(self, slots: AdapterSlots):
        self.slots = slots
        self.by_name: Dict[str, int] = {}

    def pin(self, name: str, weights) -> None:
        slot = self.by_name.pop(name, None)
        if slot is None:
            slot = self.slots.claim()  # clean: near miss, a popped slot is stored again
        self.by_name[name] = slot
        self.slots.fill(slot, weights)

    def unpin(self, name: str) -> None:
        slot = self.by_name.pop(name, None)
        if slot is not None:
            self.slots.unclaim(slot)


class RequestBinder:
    """Adds the request as a user of its adapter until it ends."""

    def __init__(self, users: UserCounts, manager: AdapterManager):
        self.users = users
        self.manager = manager
        self.bound: Dict[str, str] = {}

    def bind(self, rid: str, name: str) -> bool:
        if rid in self.bound:
            return self.bound[rid] == name
        self.users.add_user(name)  # clean: dropped here on a full table, else by unbind
        if self.manager.ensure(name) is None:
            self.users.drop_user(name)
            return False
        self.bound[rid] = name
        return True

    def switch(self, rid: str, name: str) -> bool:
        if rid not in self.bound or self.bound[rid] == name:
            return False
        self.users.add_user(name)  # leak: no slot for the new adapter, returns without drop_user
        if self.manager.ensure(name) is None:
            return False
        self.users.drop_user(self.bound[rid])
        self.bound[rid] = name
        return True

    def unbind(self, rid: str) -> None:
        name = self.bound.pop(rid, None)
        if name is not None:
            self.users.drop_user(name)


class BatchUsers:
    """Counts a running batch per adapter name."""

    def __init__(self, users: UserCounts):
        self.users = users
        self.batches: Dict[int, List[str]] = {}

    def begin(self, bid: int, names: List[str]) -> None:
        if bid in self.batches:
            raise KeyError(bid)
        taken: List[str] = []
        for name in names:
            self.users.add_user(name)  # clean: near miss, repeated names are repeated in the list
            taken.append(name)
        self.batches[bid] = taken

    def end(self, bid: int) -> None:
        for name in self.batches.pop(bid, []):
            self.users.drop_user(name)

    def begin_padded(self, bid: int, names: List[Optional[str]]) -> None:
        if bid in self.batches:
            raise KeyError(bid)
        for name in names:
            if name is not None:
                self.users.add_user(name)  # leak: the list stored is deduplicated, repeated names are dropped once
        self.batches[bid] = list(dict.fromkeys(n for n in names if n is not None))


class CanaryRollout:
    """Runs a candidate beside the stable adapter and promotes or rejects it."""

    def __init__(self, slots: AdapterSlots, stable: int):
        self.slots = slots
        self.stable = stable
        self.candidate: Optional[int] = None
        self.phase = "idle"

    def propose(self, weights) -> bool:
        if self.phase != "idle":
            return False
        try:
            self.candidate = self.slots.claim()  # leak: an inconclusive verdict goes idle with the candidate still set
        except SlotsFull:
            return False
        self.slots.fill(self.candidate, weights)
        self.phase = "running"
        return True

    def verdict(self, wins: int, losses: int) -> str:
        if self.phase != "running":
            return self.phase
        if wins > 2 * losses:
            self.slots.unclaim(self.stable)
            self.stable, self.candidate = self.candidate, None
        elif losses > wins:
            self.slots.unclaim(self.candidate)
            self.candidate = None
        self.phase = "idle"
        return self.phase


class MergedCache:
    """Merged adapter pairs keyed by both names."""

    def __init__(self, slots: AdapterSlots, limit: int):
        self.slots = slots
        self.limit = limit
        self.pairs: Dict[Tuple[str, str], int] = {}

    def merge(self, x: str, y: str, weights) -> Optional[int]:
        key = (x, y) if x < y else (y, x)
        if key not in self.pairs:
            if len(self.pairs) >= self.limit:
                victim = next(iter(self.pairs))
                self.slots.unclaim(self.pairs.pop(victim))
            try:
                self.pairs[key] = self.slots.claim()  # clean: near miss, guarded by the sorted key, forget and the limit unclaim
            except SlotsFull:
                return None
            self.slots.fill(self.pairs[key], weights)
        return self.pairs[key]

    def forget(self, name: str) -> None:
        for key in [k for k in self.pairs if name in k]:
            self.slots.unclaim(self.pairs.pop(key))


def warm_up(slots: AdapterSlots, store, names: List[str]) -> Dict[str, int]:
    """Loads adapters at start; the table belongs to the caller."""
    table: Dict[str, int] = {}
    for name in dict.fromkeys(names):
        try:
            slot = slots.claim()  # leak: an adapter that is missing in the store is skipped with its slot claimed
        except SlotsFull:
            break
        try:
            slots.fill(slot, store.load(name))
        except KeyError:
            log.warning("adapter %s is missing", name)
            continue
        table[name] = slot
    return table


def preload(slots: AdapterSlots, store, names: List[str]) -> int:
    table = warm_up(slots, store, names)  # clean: near miss, all of the table is unclaimed after the probe
    ok = sum(1 for slot in table.values() if torch.isfinite(slots.a[slot]).all())
    for slot in table.values():
        slots.unclaim(slot)
    return ok
