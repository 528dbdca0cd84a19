"""GPU slots for LoRA adapters, with pins held by running requests."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch

logger = logging.getLogger(__name__)


class SlotTable:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._pins: dict[int, int] = {}

    def claim(self) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()
        self._pins[slot] = 0
        return slot

    def vacate(self, slot: int) -> None:
        if self._pins.pop(slot, 0):
            raise RuntimeError(f"slot {slot} is still pinned")
        self._free.append(slot)

    def pin(self, slot: int) -> None:
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1

    def pinned(self, slot: int) -> bool:
        return self._pins.get(slot, 0) > 0


@dataclass
class LoraRequest:
    request_id: str
    adapter: Optional[str]
    prompt: list[int]
    slot: Optional[int] = None
    output: list[int] = field(default_factory=list)
    max_tokens: int = 128


class LoraManager:
    def __init__(self, table: SlotTable, root: Path, rank: int, hidden: int) -> None:
        self.table = table
        self.root = root
        self.bank = torch.zeros(64, rank, hidden)
        self.resident: OrderedDict[str, int] = OrderedDict()
        self.aliases: dict[str, str] = {}

    def _read(self, name: str) -> Optional[torch.Tensor]:
        path = self.root / f"{name}.pt"
        try:
            return torch.load(path, map_location="cpu")
        except (OSError, EOFError):
            logger.warning("adapter %s is unreadable", name)
            return None

    def _claim_or_evict(self) -> Optional[int]:
        slot = self.table.claim()  # clean: handed to the caller
        if slot is not None:
            return slot
        for name, used in self.resident.items():
            if not self.table.pinned(used):
                del self.resident[name]
                self.table.vacate(used)
                return self.table.claim()  # clean: handed to the caller
        return None

    def activate(self, name: str) -> Optional[int]:
        name = self.aliases.get(name, name)
        if name in self.resident:
            self.resident.move_to_end(name)
            return self.resident[name]
        slot = self._claim_or_evict()  # leak: an unreadable adapter returns None with the slot neither resident nor vacated
        if slot is None:
            return None
        weights = self._read(name)
        if weights is None:
            return None
        self.bank[slot].copy_(weights)
        self.resident[name] = slot
        return slot

    def preload(self, names: list[str]) -> int:
        loaded = 0
        for name in names:
            if name in self.resident:
                continue
            weights = self._read(name)
            if weights is None:
                continue
            slot = self.table.claim()  # clean: near miss, weights are read first; the slot lands in resident, where eviction and unload find it
            if slot is None:
                break
            self.bank[slot].copy_(weights)
            self.resident[name] = slot
            loaded += 1
        return loaded

    def reload(self, name: str) -> bool:
        weights = self._read(name)
        if weights is None:
            return False
        slot = self.table.claim()  # leak: the entry of a resident adapter is overwritten, so its former slot is never vacated
        if slot is None:
            return False
        self.bank[slot].copy_(weights)
        self.resident[name] = slot
        return True

    def swap_version(self, name: str, version: str) -> bool:
        weights = self._read(f"{name}-{version}")
        if weights is None or self.table.pinned(self.resident.get(name, -1)):
            return False
        slot = self._claim_or_evict()  # clean: near miss, the slot of the old version is popped and vacated before the entry is replaced
        if slot is None:
            return False
        old = self.resident.pop(name, None)
        if old is not None:
            self.table.vacate(old)
        self.bank[slot].copy_(weights)
        self.resident[name] = slot
        return True

    def merge(self, parts: dict[str, float], target: str) -> bool:
        if target in self.resident:
            return True
        slot = self.table.claim()  # clean: near miss, a missing part vacates it, otherwise it becomes resident
        if slot is None:
            return False
        total = torch.zeros_like(self.bank[slot])
        for name, weight in parts.items():
            tensor = self._read(name)
            if tensor is None:
                self.table.vacate(slot)
                return False
            total.add_(tensor, alpha=weight)
        self.bank[slot].copy_(total)
        self.resident[target] = slot
        return True

    def unload(self, name: str) -> bool:
        slot = self.resident.get(name)
        if slot is None or self.table.pinned(slot):
            return False
        del self.resident[name]
        self.table.vacate(slot)
        return True


class LoraScheduler:
    def __init__(self, manager: LoraManager, max_running: int = 32) -> None:
        self.manager = manager
        self.max_running = max_running
        self.waiting: list[LoraRequest] = []
        self.running: dict[str, LoraRequest] = {}

    def _attach(self, req: LoraRequest) -> bool:
        if req.adapter is None:
            return True
        slot = self.manager.activate(req.adapter)
        if slot is None:
            return False
        self.manager.table.pin(slot)  # leak: cancel() drops the running request without the unpin that finish() does
        req.slot = slot
        return True

    def schedule(self) -> None:
        pending: list[LoraRequest] = []
        for req in self.waiting:
            if len(self.running) >= self.max_running or not self._attach(req):
                pending.append(req)
                continue
            self.running[req.request_id] = req
        self.waiting = pending

    def score(self, adapters: list[str], hidden: torch.Tensor) -> dict[str, float]:
        scores: dict[str, float] = {}
        for name in adapters:
            slot = self.manager.activate(name)
            if slot is None:
                continue
            self.manager.table.pin(slot)  # leak: a shape mismatch goes on with continue and leaves the pin
            if hidden.shape[-1] != self.manager.bank.shape[-1]:
                continue
            scores[name] = float((hidden @ self.manager.bank[slot].T).mean())
            self.manager.table.unpin(slot)
        return scores

    def finish(self, request_id: str) -> Optional[LoraRequest]:
        req = self.running.pop(request_id, None)
        if req is not None and req.slot is not None:
            self.manager.table.unpin(req.slot)
            req.slot = None
        return req

    def cancel(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            logger.info("request %s cancelled", request_id)
            return
        self.waiting = [r for r in self.waiting if r.request_id != request_id]
