"""Adapter slots and host staging for a multi-LoRA model runner."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass
class LoRARequest:
    request_id: str
    adapter: str
    rank: int
    path: Path


class AdapterSlots:
    """GPU slots, shared between the requests that use one adapter."""

    def __init__(self, max_loras: int) -> None:
        self._free = list(range(max_loras))
        self._by_name: dict[str, int] = {}
        self._users: dict[int, int] = {}

    def acquire_slot(self, adapter: str) -> int | None:
        slot = self._by_name.get(adapter)
        if slot is None:
            if not self._free:
                return None
            slot = self._free.pop()
            self._by_name[adapter] = slot
            self._users[slot] = 0
        self._users[slot] += 1
        return slot

    def release_slot(self, slot: int) -> None:
        self._users[slot] -= 1
        if self._users[slot] == 0:
            del self._users[slot]
            self._by_name = {k: v for k, v in self._by_name.items() if v != slot}
            self._free.append(slot)


class StagingArena:
    def __init__(self, rows: int, max_rank: int, hidden: int) -> None:
        self._rows = [torch.empty(max_rank, hidden, pin_memory=torch.cuda.is_available()) for _ in range(rows)]

    def checkout(self) -> torch.Tensor | None:
        return self._rows.pop() if self._rows else None

    def checkin(self, row: torch.Tensor) -> None:
        self._rows.append(row)


class LoRAWorkerManager:
    def __init__(self, slots: AdapterSlots, arena: StagingArena, stacked: torch.Tensor) -> None:
        self.slots = slots
        self.arena = arena
        self.stacked = stacked
        self.active: dict[str, int] = {}
        self.resident: dict[str, int] = {}
        self.draft_slots: dict[str, int] = {}

    def pin_resident(self, adapter: str) -> bool:
        if adapter in self.resident:
            return True
        slot = self.slots.acquire_slot(adapter)  # clean: kept in resident until unpin_resident
        if slot is None:
            return False
        self.resident[adapter] = slot
        return True

    def unpin_resident(self, adapter: str) -> None:
        slot = self.resident.pop(adapter, None)
        if slot is not None:
            self.slots.release_slot(slot)

    def _load_into(self, slot: int, req: LoRARequest) -> bool:
        row = self.arena.checkout()  # clean: near miss, checked in by the finally on all three ways out
        if row is None:
            return False
        try:
            weights = torch.load(req.path, map_location="cpu")
            if weights.shape[0] > row.shape[0]:
                return False
            row[: weights.shape[0]].copy_(weights)
            self.stacked[slot].copy_(row, non_blocking=True)
            return True
        except FileNotFoundError:
            logger.warning("adapter %s is missing", req.adapter)
            return False
        finally:
            self.arena.checkin(row)

    def activate(self, req: LoRARequest) -> bool:
        slot = self.slots.acquire_slot(req.adapter)  # leak: a failed load returns False without giving the slot back
        if slot is None:
            return False
        if not self._load_into(slot, req):
            return False
        self.active[req.request_id] = slot
        return True

    def activate_draft(self, req: LoRARequest) -> bool:
        name = f"{req.adapter}/draft"
        slot = self.slots.acquire_slot(name)  # clean: near miss, released when the load fails, else kept in draft_slots
        if slot is None:
            return False
        if not self._load_into(slot, req):
            self.slots.release_slot(slot)
            return False
        self.draft_slots[req.request_id] = slot
        return True

    def retarget(self, req: LoRARequest, adapter: str) -> bool:
        slot = self.slots.acquire_slot(adapter)  # leak: overwrites the slot that the request already holds in active
        if slot is None:
            return False
        self.active[req.request_id] = slot
        return True

    def retarget_draft(self, req: LoRARequest, adapter: str) -> bool:
        old = self.draft_slots.get(req.request_id)
        slot = self.slots.acquire_slot(f"{adapter}/draft")  # clean: near miss, the old slot was read first and is released
        if slot is None:
            return False
        self.draft_slots[req.request_id] = slot
        if old is not None:
            self.slots.release_slot(old)
        return True

    def merge(self, first: LoRARequest, second: LoRARequest, into: torch.Tensor) -> bool:
        left = self.slots.acquire_slot(first.adapter)  # leak: nobody releases it when the second slot is not to be had
        right = self.slots.acquire_slot(second.adapter)  # clean: near miss, if left is None and this one is not, it goes back
        if left is None:
            if right is not None:
                self.slots.release_slot(right)
            return False
        if right is None:
            return False
        into.copy_(self.stacked[left] + self.stacked[right])
        self.slots.release_slot(left)
        self.slots.release_slot(right)
        return True

    def checksum(self, adapters: list[str]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for adapter in adapters:
            slot = self.slots.acquire_slot(adapter)  # leak: the continue for an all-zero adapter skips the release
            if slot is None:
                continue
            total = float(self.stacked[slot].abs().sum())
            if total == 0.0:
                continue
            sums[adapter] = total
            self.slots.release_slot(slot)
        return sums

    def dump_row(self, adapter: str, out: list[Any]) -> bool:
        row = self.arena.checkout()  # clean: near miss, each branch checks it in
        if row is None:
            return False
        slot = self.resident.get(adapter)
        if slot is None:
            self.arena.checkin(row)
            return False
        row.copy_(self.stacked[slot])
        out.append(row.clone())
        self.arena.checkin(row)
        return True

    def export_row(self, adapter: str) -> torch.Tensor | None:
        slot = self.resident.get(adapter)
        row = self.arena.checkout()  # leak: the caller gets a copy, and the row itself is dropped
        if slot is None or row is None:
            if row is not None:
                self.arena.checkin(row)
            return None
        row.copy_(self.stacked[slot])
        return row.clone()

    def finish(self, request_id: str) -> None:
        for table in (self.active, self.draft_slots):
            slot = table.pop(request_id, None)
            if slot is not None:
                self.slots.release_slot(slot)
