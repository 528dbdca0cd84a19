"""LoRA adapter slots on the device, with pinning for the batch in flight."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Iterable

import torch

logger = logging.getLogger(__name__)


@dataclass
class LoRARequest:
    lora_id: int
    path: str
    rank: int = 16


@dataclass
class GenerateReq:
    rid: str
    lora: LoRARequest | None = None
    slot: int | None = None
    started: float = field(default_factory=time.monotonic)


class AdapterRegistry:
    """Counts who uses an adapter; an adapter with users is not evicted."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}

    def pin(self, lora_id: int) -> None:
        self._users[lora_id] = self._users.get(lora_id, 0) + 1

    def unpin(self, lora_id: int) -> None:
        n = self._users[lora_id] - 1
        if n:
            self._users[lora_id] = n
        else:
            del self._users[lora_id]

    def in_use(self, lora_id: int) -> bool:
        return lora_id in self._users


class SlotTable:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]

    def claim(self) -> int | None:
        return self._free.pop() if self._free else None

    def relinquish(self, slot: int) -> None:
        self._free.append(slot)


class LoRAManager:
    def __init__(self, num_slots: int, max_rank: int, hidden: int, device: str = "cuda") -> None:
        self.registry = AdapterRegistry()
        self.slots = SlotTable(num_slots)
        self.max_rank = max_rank
        self.active: OrderedDict[int, int] = OrderedDict()
        self.a = torch.zeros(num_slots, max_rank, hidden, device=device)
        self.b = torch.zeros(num_slots, hidden, max_rank, device=device)
        self.draft_slot: int | None = None

    def _evict_one(self) -> int | None:
        for lora_id, slot in self.active.items():
            if not self.registry.in_use(lora_id):
                del self.active[lora_id]
                return slot
        return None

    def _copy_in(self, slot: int, req: LoRARequest) -> None:
        state = torch.load(req.path, map_location="cpu")
        self.a[slot, : req.rank].copy_(state["lora_A"])
        self.b[slot, :, : req.rank].copy_(state["lora_B"])

    def activate(self, req: LoRARequest) -> int | None:
        slot = self.active.get(req.lora_id)
        if slot is not None:
            self.active.move_to_end(req.lora_id)
            return slot
        slot = self.slots.claim()  # leak: the load error and the rank check return without giving the slot back
        if slot is None:
            slot = self._evict_one()  # leak: an evicted slot is lost in the same two returns
            if slot is None:
                return None
        if req.rank > self.max_rank:
            logger.warning("rank %d of %s above %d", req.rank, req.path, self.max_rank)
            return None
        try:
            self._copy_in(slot, req)
        except (OSError, KeyError) as e:
            logger.error("could not load adapter %s: %s", req.path, e)
            return None
        self.active[req.lora_id] = slot
        return slot

    def preload(self, reqs: Iterable[LoRARequest]) -> int:
        loaded = 0
        for req in reqs:
            if req.lora_id in self.active:
                continue
            slot = self.slots.claim()  # clean: near miss, given back on the load error, else in active
            if slot is None:
                break
            try:
                self._copy_in(slot, req)
            except (OSError, KeyError):
                self.slots.relinquish(slot)
                continue
            self.active[req.lora_id] = slot
            loaded += 1
        return loaded

    def deactivate(self, lora_id: int) -> bool:
        if self.registry.in_use(lora_id):
            return False
        slot = self.active.pop(lora_id, None)
        if slot is None:
            return False
        self.slots.relinquish(slot)
        return True

    def set_draft(self, req: LoRARequest) -> bool:
        slot = self.slots.claim()  # leak: a second set_draft overwrites draft_slot
        if slot is None:
            return False
        self._copy_in(slot, req)
        self.draft_slot = slot
        return True

    def clear_draft(self) -> None:
        if self.draft_slot is not None:
            self.slots.relinquish(self.draft_slot)
            self.draft_slot = None


class LoRABatcher:
    def __init__(self, manager: LoRAManager, max_batch: int) -> None:
        self.manager = manager
        self.max_batch = max_batch
        self.waiting: list[GenerateReq] = []
        self.running: dict[str, GenerateReq] = {}

    def add(self, req: GenerateReq) -> None:
        self.waiting.append(req)

    def admit(self) -> list[GenerateReq]:
        admitted: list[GenerateReq] = []
        deferred: list[GenerateReq] = []
        while self.waiting and len(self.running) < self.max_batch:
            req = self.waiting.pop(0)
            if req.lora is not None:
                self.manager.registry.pin(req.lora.lora_id)  # leak: kept when the request is deferred, and pinned again at the next try
                slot = self.manager.activate(req.lora)  # clean: the manager keeps the slot in active
                if slot is None:
                    deferred.append(req)
                    continue
                req.slot = slot
            self.running[req.rid] = req
            admitted.append(req)
        self.waiting = deferred + self.waiting
        return admitted

    def try_admit_one(self, req: GenerateReq) -> bool:
        if req.lora is None:
            self.running[req.rid] = req
            return True
        lora_id = req.lora.lora_id
        self.manager.registry.pin(lora_id)  # clean: near miss, unpinned when no slot is found, else by finish
        req.slot = self.manager.activate(req.lora)  # clean: the manager keeps the slot in active
        if req.slot is None:
            self.manager.registry.unpin(lora_id)
            return False
        self.running[req.rid] = req
        return True

    def finish(self, rid: str) -> GenerateReq | None:
        req = self.running.pop(rid, None)
        if req is None:
            return None
        if req.lora is not None:
            self.manager.registry.unpin(req.lora.lora_id)
        return req

    def swap_adapter(self, rid: str, new: LoRARequest) -> bool:
        req = self.running[rid]
        self.manager.registry.pin(new.lora_id)  # clean: near miss, taken over by the request, or unpinned on failure
        slot = self.manager.activate(new)  # clean: the manager keeps the slot in active
        if slot is None:
            self.manager.registry.unpin(new.lora_id)
            return False
        if req.lora is not None:
            self.manager.registry.unpin(req.lora.lora_id)
        req.lora, req.slot = new, slot
        return True
