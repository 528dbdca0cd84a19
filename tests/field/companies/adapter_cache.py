"""Multi-tenant LoRA adapter cache: device slots, reference counts, per-tenant quota."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


class Placement(Enum):
    OWNED = "owned"
    SHARED = "shared"


@dataclass
class AdapterSlot:
    index: int
    rank: int = 0
    adapter_id: Optional[str] = None


class SlotArena:
    def __init__(self, n: int, max_rank: int, hidden: int) -> None:
        self.a = torch.zeros(n, max_rank, hidden)
        self.b = torch.zeros(n, hidden, max_rank)
        self._free: List[AdapterSlot] = [AdapterSlot(i) for i in range(n)]
        self.max_rank = max_rank

    def reserve(self, rank: int) -> Optional[AdapterSlot]:
        if not self._free:
            return None
        slot = self._free.pop()  # leak: popped before the rank is checked
        if rank > self.max_rank:
            return None
        slot.rank = rank
        return slot

    def reserve_any(self) -> Optional[AdapterSlot]:
        if not self._free:
            return None
        slot = self._free.pop()  # clean: handed to the caller
        slot.rank = self.max_rank
        return slot

    def unreserve(self, slot: AdapterSlot) -> None:
        slot.adapter_id = None
        slot.rank = 0
        self._free.append(slot)


class TenantQuota:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._used: Dict[str, int] = {}

    def charge(self, tenant: str) -> bool:
        n = self._used.get(tenant, 0)
        if n >= self.per_tenant:
            return False
        self._used[tenant] = n + 1
        return True

    def refund(self, tenant: str) -> None:
        self._used[tenant] -= 1


class AdapterCache:
    def __init__(self, arena: SlotArena, quota: TenantQuota, loader: Callable[[str], Dict[str, torch.Tensor]]):
        self.arena = arena
        self.quota = quota
        self.loader = loader
        self.slots: Dict[str, AdapterSlot] = {}
        self.tenant_of: Dict[str, str] = {}
        self._lock = threading.RLock()

    def load(self, tenant: str, adapter_id: str) -> bool:
        with self._lock:  # clean: with releases
            if adapter_id in self.slots:
                return True
            if not self.quota.charge(tenant):  # clean: near miss, refunded where no slot is free, by unload() otherwise
                return False
            slot = self.arena.reserve_any()  # clean: stored, unload() unreserves
            if slot is None:
                self.quota.refund(tenant)
                return False
            self._fill(slot, self.loader(adapter_id))
            slot.adapter_id = adapter_id
            self.slots[adapter_id] = slot
            self.tenant_of[adapter_id] = tenant
            return True

    def load_ranked(self, tenant: str, adapter_id: str, rank: int) -> bool:
        if not self.quota.charge(tenant):  # leak: not refunded when there is no slot
            return False
        slot = self.arena.reserve(rank)  # clean: stored, unload() unreserves
        if slot is None:
            logger.info("no slot for %s (rank %d)", adapter_id, rank)
            return False
        self._fill(slot, self.loader(adapter_id))
        previous = self.slots.pop(adapter_id, None)
        if previous is not None:
            self.arena.unreserve(previous)
            self.quota.refund(self.tenant_of[adapter_id])
        self.slots[adapter_id] = slot
        self.tenant_of[adapter_id] = tenant
        return True

    def _fill(self, slot: AdapterSlot, weights: Dict[str, torch.Tensor]) -> None:
        self.arena.a[slot.index].copy_(weights["a"])
        self.arena.b[slot.index].copy_(weights["b"])

    def unload(self, adapter_id: str) -> None:
        with self._lock:  # clean: with releases
            slot = self.slots.pop(adapter_id, None)
            if slot is None:
                return
            self.arena.unreserve(slot)
            self.quota.refund(self.tenant_of.pop(adapter_id))

    def apply_once(self, x: torch.Tensor, weights: Dict[str, torch.Tensor]) -> torch.Tensor:
        slot = self.arena.reserve_any()  # clean: unreserved before the return
        if slot is None:
            return x
        self._fill(slot, weights)
        out = x @ self.arena.a[slot.index].T @ self.arena.b[slot.index].T
        self.arena.unreserve(slot)
        return out

    def validate(self, weights: Dict[str, torch.Tensor]) -> bool:
        slot = self.arena.reserve_any()  # leak: the handler returns False with the slot
        if slot is None:
            return False
        try:
            self._fill(slot, weights)
        except (KeyError, RuntimeError) as exc:
            logger.warning("bad adapter: %s", exc)
            return False
        self.arena.unreserve(slot)
        return True

    def bind(self, placement: Placement, adapter_id: str) -> Any:
        slot = self.slots.get(adapter_id)
        if placement is Placement.OWNED:
            slot = self.arena.reserve_any()  # clean: near miss, unbind() of an owned placement unreserves
        return slot

    def unbind(self, placement: Placement, slot: Optional[AdapterSlot]) -> None:
        if placement is Placement.OWNED and slot is not None:
            self.arena.unreserve(slot)

    def run_bound(self, placement: Placement, adapter_id: str, x: torch.Tensor) -> torch.Tensor:
        slot = self.bind(placement, adapter_id)  # clean: near miss, unbind() is given the same placement
        out = x if slot is None else x @ self.arena.a[slot.index].T
        self.unbind(placement, slot)
        return out

    def run_isolated(self, adapter_id: str, x: torch.Tensor) -> torch.Tensor:
        slot = self.bind(Placement.OWNED, adapter_id)  # leak: unbound as a shared one, which does nothing
        out = x if slot is None else x @ self.arena.a[slot.index].T
        self.unbind(Placement.SHARED, slot)
        return out

    def swap(self, old_id: str, new_id: str) -> bool:
        self._lock.acquire()  # leak: returns under the lock when the old adapter is not loaded
        slot = self.slots.get(old_id)
        if slot is None or new_id in self.slots:
            return False
        self._fill(slot, self.loader(new_id))
        del self.slots[old_id]
        self.slots[new_id] = slot
        self.tenant_of[new_id] = self.tenant_of.pop(old_id)
        self._lock.release()
        return True

    def reset(self) -> None:
        for adapter_id in list(self.slots):
            self.unload(adapter_id)
