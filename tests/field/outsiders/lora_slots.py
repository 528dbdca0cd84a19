"""GPU slots for LoRA adapters."""
from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any, Optional

import torch

LOG = logging.getLogger("lora")


class NoSlot(Exception):
    """Every adapter slot is in use."""


class SlotTable:
    def __init__(self, max_loras: int) -> None:
        self.used = [False] * max_loras

    def obtain(self) -> int:
        for i, taken in enumerate(self.used):
            if not taken:
                self.used[i] = True
                return i
        raise NoSlot()

    def recycle(self, idx: int) -> None:
        assert self.used[idx], idx
        self.used[idx] = False


class AdapterManager:
    def __init__(self, slots: SlotTable, hidden: int, rank: int) -> None:
        self.slots = slots
        self.hidden = hidden
        self.rank = rank
        self.active: "OrderedDict[str, int]" = OrderedDict()
        self.pinned: dict[str, int] = {}
        self.a = torch.zeros(len(slots.used), rank, hidden)
        self.b = torch.zeros(len(slots.used), hidden, rank)

    def _load(self, path: Path) -> Optional[dict[str, torch.Tensor]]:
        if not path.exists():
            return None
        return torch.load(path, map_location="cpu")

    def activate(self, name: str, path: Path) -> int:
        if name in self.active:
            self.active.move_to_end(name)
            return self.active[name]
        weights = self._load(path)
        if weights is None:
            raise FileNotFoundError(path)
        slot = self.slots.obtain()  # clean: recorded in active, deactivate() recycles
        self.a[slot].copy_(weights["lora_a"])
        self.b[slot].copy_(weights["lora_b"])
        self.active[name] = slot
        return slot

    def activate_from(self, name: str, path: Path) -> int:
        slot = self.slots.obtain()  # leak: a missing file raises after the slot was taken
        weights = self._load(path)
        if weights is None:
            raise FileNotFoundError(path)
        self.a[slot].copy_(weights["lora_a"])
        self.b[slot].copy_(weights["lora_b"])
        self.active[name] = slot
        return slot

    def activate_state(self, name: str, weights: dict[str, torch.Tensor]) -> Optional[int]:
        if name in self.active:
            return self.active[name]
        slot = self.slots.obtain()  # clean: near miss, the mismatch branch recycles before it returns
        if weights["lora_a"].shape[0] > self.rank:
            LOG.error("rank of %s too large", name)
            self.slots.recycle(slot)
            return None
        r = weights["lora_a"].shape[0]
        self.a[slot, :r].copy_(weights["lora_a"])
        self.b[slot, :, :r].copy_(weights["lora_b"])
        self.active[name] = slot
        return slot

    def reload(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        slot = self.slots.obtain()  # leak: a name that is pinned already loses its earlier slot
        if name in self.pinned:
            LOG.info("replacing weights of %s", name)
        self.pinned[name] = slot
        self.a[slot].copy_(weights["lora_a"])
        self.b[slot].copy_(weights["lora_b"])

    def swap(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        fresh = self.slots.obtain()  # clean: near miss, the old slot is recycled when the entry is replaced
        self.a[fresh].copy_(weights["lora_a"])
        self.b[fresh].copy_(weights["lora_b"])
        stale = self.active.pop(name, None)
        if stale is not None:
            self.slots.recycle(stale)
        self.active[name] = fresh

    def merge(self, names: list[str], base: torch.Tensor) -> torch.Tensor:
        scratch = self.slots.obtain()  # clean: recycled on both branches
        live = [n for n in names if n in self.active]
        if not live:
            self.slots.recycle(scratch)
            return base
        self.a[scratch].zero_()
        for n in live:
            self.a[scratch].add_(self.a[self.active[n]])
        merged = base + self.b[self.active[live[0]]] @ self.a[scratch]
        self.slots.recycle(scratch)
        return merged

    def preload(self, found: dict[str, dict[str, torch.Tensor]]) -> list[str]:
        loaded = []
        for name, weights in found.items():
            try:
                slot = self.slots.obtain()  # leak: adapters without lora_b are skipped and their slot stays used
            except NoSlot:
                break
            if "lora_b" not in weights:
                LOG.warning("%s is incomplete", name)
                continue
            self.a[slot].copy_(weights["lora_a"])
            self.b[slot].copy_(weights["lora_b"])
            self.active[name] = slot
            loaded.append(name)
        return loaded

    def deactivate(self, name: str) -> bool:
        slot = self.active.pop(name, None)
        if slot is None:
            return False
        self.slots.recycle(slot)
        return True

    def evict_oldest(self) -> None:
        _, slot = self.active.popitem(last=False)
        self.slots.recycle(slot)

    def unpin(self, name: str) -> None:
        slot = self.pinned.pop(name)
        self.slots.recycle(slot)

    def stats(self) -> dict[str, Any]:
        return {"active": len(self.active), "used": sum(self.slots.used)}
