"""MoE expert weights: resident in a limited number of GPU slots, fetched from host on demand."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

logger = logging.getLogger(__name__)

ExpertKey = Tuple[int, int]


class Where(Enum):
    HOST = 0
    DEVICE = 1


@dataclass(eq=False)
class ExpertSlot:
    index: int
    key: Optional[ExpertKey] = None
    payload: bytes = b""


class Lease(NamedTuple):
    slot: ExpertSlot
    transient: bool


class FetchError(RuntimeError):
    pass


class SlotArena:
    def __init__(self, count: int) -> None:
        self._free = [ExpertSlot(i) for i in range(count)]
        self.count = count

    def alloc_slot(self) -> Optional[ExpertSlot]:
        return self._free.pop() if self._free else None

    def free_slot(self, slot: ExpertSlot) -> None:
        slot.key = None
        slot.payload = b""
        self._free.append(slot)


class HostStore:
    def __init__(self, weights: Dict[ExpertKey, bytes]) -> None:
        self.weights = weights

    def fetch(self, key: ExpertKey) -> bytes:
        try:
            return self.weights[key]
        except KeyError:
            raise FetchError(f"expert {key} is not on this host") from None


class ExpertCache:
    def __init__(self, arena: SlotArena, store: HostStore) -> None:
        self.arena = arena
        self.store = store
        self.resident: "OrderedDict[ExpertKey, ExpertSlot]" = OrderedDict()
        self.loading: Dict[ExpertKey, ExpertSlot] = {}

    def _evict_one(self) -> bool:
        if not self.resident:
            return False
        _, slot = self.resident.popitem(last=False)
        self.arena.free_slot(slot)
        return True

    def ensure(self, key: ExpertKey) -> Optional[ExpertSlot]:
        """Makes the expert resident; the cache keeps the slot."""
        if key in self.loading:
            self.finish_load(key)
        if key in self.resident:
            self.resident.move_to_end(key)
            return self.resident[key]
        slot = self.arena.alloc_slot()  # clean: near miss, None is retried below, otherwise resident keeps it
        if slot is None:
            if not self._evict_one():
                return None
            slot = self.arena.alloc_slot()  # clean: as above
        slot.key = key
        self.resident[key] = slot
        slot.payload = self.store.fetch(key)
        return slot

    def preload(self, keys: Iterable[ExpertKey]) -> int:
        loaded = 0
        for key in keys:
            if key in self.resident or key in self.loading:
                continue
            slot = self.arena.alloc_slot()  # leak: FetchError is caught and the loop goes on without free_slot
            if slot is None:
                break
            try:
                slot.payload = self.store.fetch(key)
            except FetchError as exc:
                logger.debug("preload: %s", exc)
                continue
            slot.key = key
            self.resident[key] = slot
            loaded += 1
        return loaded

    def start_load(self, key: ExpertKey) -> bool:
        if key in self.loading or key in self.resident:
            return False
        slot = self.arena.alloc_slot()  # clean: near miss, goes loading -> resident, or is freed by cancel
        if slot is None:
            return False
        slot.key = key
        self.loading[key] = slot
        return True

    def finish_load(self, key: ExpertKey) -> None:
        payload = self.store.fetch(key)
        slot = self.loading.pop(key)
        slot.payload = payload
        self.resident[key] = slot

    def cancel(self, key: ExpertKey) -> None:
        slot = self.loading.pop(key, None)
        if slot is not None:
            self.arena.free_slot(slot)

    def borrow(self, key: ExpertKey) -> Optional[Lease]:
        """Resident experts are lent as they are; others get a transient slot for one use."""
        slot = self.resident.get(key)
        if slot is not None:
            return Lease(slot, transient=False)
        slot = self.arena.alloc_slot()  # clean: near miss, transient=True makes settle free it
        if slot is None:
            return None
        slot.payload = self.store.fetch(key)
        return Lease(slot, transient=True)

    def settle(self, lease: Lease) -> None:
        if lease.transient:
            self.arena.free_slot(lease.slot)

    def trim(self, keep: int) -> None:
        while len(self.resident) > keep:
            self._evict_one()


class StagedLayer:
    """Slots for one layer's shared experts, swapped between two sets."""

    def __init__(self, arena: SlotArena) -> None:
        self.arena = arena
        self.active: List[ExpertSlot] = []
        self.spare: List[ExpertSlot] = []

    def fill_spare(self, payloads: List[bytes]) -> bool:
        fresh: List[ExpertSlot] = []
        for payload in payloads:
            slot = self.arena.alloc_slot()  # clean: near miss, all of fresh are freed on a refusal, else become spare
            if slot is None:
                while fresh:
                    self.arena.free_slot(fresh.pop())
                return False
            slot.payload = payload
            fresh.append(slot)
        for slot in self.spare:
            self.arena.free_slot(slot)
        self.spare = fresh
        return True

    def flip(self) -> None:
        self.active, self.spare = self.spare, self.active

    def close(self) -> None:
        for slot in self.active + self.spare:
            self.arena.free_slot(slot)
        self.active, self.spare = [], []


class MoELayer:
    def __init__(self, layer: int, cache: ExpertCache, location: Where = Where.HOST) -> None:
        self.layer = layer
        self.cache = cache
        self.location = location
        self._held: Optional[Lease] = None
        self._by_token: Dict[int, Lease] = {}

    def apply(self, expert: int, token: int) -> int:
        lease = self.cache.borrow((self.layer, expert))  # clean: near miss, settle looks at transient
        if lease is None:
            return 0
        result = token * len(lease.slot.payload)
        self.cache.settle(lease)
        return result

    def apply_top1(self, expert: int, gate: float, token: int) -> float:
        lease = self.cache.borrow((self.layer, expert))  # leak: a gate of zero returns before settle
        if lease is None or gate == 0.0:
            return 0.0
        result = gate * token * len(lease.slot.payload)
        self.cache.settle(lease)
        return result

    def expert_bytes(self, expert: int) -> bytes:
        lease = self.cache.borrow((self.layer, expert))  # leak: the payload is returned, the lease is not settled
        return lease.slot.payload if lease is not None else b""

    def route(self, token: int, expert: int) -> bool:
        if token in self._by_token:
            return True
        lease = self.cache.borrow((self.layer, expert))  # clean: kept by token until finish_token
        if lease is None:
            return False
        self._by_token[token] = lease
        return True

    def finish_token(self, token: int) -> int:
        lease = self._by_token.pop(token)
        size = len(lease.slot.payload)
        self.cache.settle(lease)
        return size

    def hold(self, expert: int) -> bool:
        self._held = self.cache.borrow((self.layer, expert))  # leak: a second hold overwrites the first lease
        return self._held is not None

    def drop(self) -> None:
        if self._held is not None:
            self.cache.settle(self._held)
            self._held = None

    def forward(self, token: int, experts: List[Tuple[int, float]]) -> float:
        if self.location is Where.HOST:
            lease = self.cache.borrow((self.layer, experts[0][0]))  # clean: near miss, the same condition settles it below
        total = sum(gate * token for _, gate in experts)
        if self.location is Where.HOST and lease is not None:
            self.cache.settle(lease)
        return total

    def forward_pair(self, token: int, first: int, second: int) -> Optional[int]:
        leases: List[Lease] = []
        for expert in (first, second):
            lease = self.cache.borrow((self.layer, expert))  # leak: a refused second expert returns with the first one's lease
            if lease is None:
                return None
            leases.append(lease)
        total = sum(token * len(lease.slot.payload) for lease in leases)
        for lease in leases:
            self.cache.settle(lease)
        return total
