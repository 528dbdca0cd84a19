"""LoRA adapter slots on the GPU, shared by the requests of a batch."""
from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


@dataclass
class LoraSlot:
    index: int
    name: str = ""
    rank: int = 0
    users: int = 0


class LoraSlotPool:
    """Slots of the stacked A/B weight buffers."""

    def __init__(self, max_loras: int, max_rank: int, hidden: int, device: str = "cuda") -> None:
        self.max_rank = max_rank
        self.lora_a = torch.zeros(max_loras, max_rank, hidden, device=device)
        self.lora_b = torch.zeros(max_loras, hidden, max_rank, device=device)
        self._idle: list[LoraSlot] = [LoraSlot(i) for i in range(max_loras)]

    def acquire_slot(self) -> LoraSlot | None:
        try:
            return self._idle.pop()  # clean: to the caller
        except IndexError:
            return None

    def release_slot(self, slot: LoraSlot) -> None:
        slot.name = ""
        slot.rank = 0
        slot.users = 0
        self._idle.append(slot)


@dataclass
class AdapterConfig:
    name: str
    rank: int
    alpha: float
    path: Path


def read_config(path: Path) -> AdapterConfig | None:
    """Read adapter_config.json; None when it is not a LoRA adapter."""
    f = open(path / "adapter_config.json", encoding="utf-8")  # leak: the return for other adapter types leaves the file open
    raw = json.load(f)
    if raw.get("peft_type") != "LORA":
        return None
    f.close()
    return AdapterConfig(path.name, raw["r"], raw.get("lora_alpha", raw["r"]), path)


def read_modules(path: Path) -> list[str]:
    with open(path / "target_modules.txt", encoding="utf-8") as f:  # clean: scoped
        return [line.strip() for line in f if line.strip()]


class LoraManager:
    """Loads adapters on demand and evicts the least recently used."""

    def __init__(self, pool: LoraSlotPool, root: Path) -> None:
        self.pool = pool
        self.root = root
        self._lock = threading.RLock()
        self._loaded: OrderedDict[str, LoraSlot] = OrderedDict()
        self._pinned: dict[str, LoraSlot] = {}

    def _evict_one(self) -> bool:
        for name, slot in self._loaded.items():
            if slot.users == 0:
                del self._loaded[name]
                self.pool.release_slot(slot)
                return True
        return False

    def _take_slot(self) -> LoraSlot | None:
        slot = self.pool.acquire_slot()  # clean: near miss, rebound only when nothing was taken
        while slot is None and self._evict_one():
            slot = self.pool.acquire_slot()  # clean: to the caller
        return slot

    def _copy_weights(self, slot: LoraSlot, cfg: AdapterConfig) -> bool:
        weights = torch.load(cfg.path / "adapter.pt", map_location="cpu")
        if cfg.rank > self.pool.max_rank:
            return False
        self.pool.lora_a[slot.index, :cfg.rank].copy_(weights["a"])
        self.pool.lora_b[slot.index, :, :cfg.rank].copy_(weights["b"] * (cfg.alpha / cfg.rank))
        slot.name, slot.rank = cfg.name, cfg.rank
        return True

    def load(self, name: str) -> LoraSlot | None:
        """Return the slot of an adapter, loading it when needed."""
        with self._lock:  # clean: scoped
            slot = self._loaded.get(name)
            if slot is not None:
                self._loaded.move_to_end(name)
                slot.users += 1
                return slot
            cfg = read_config(self.root / name)
            if cfg is None:
                return None
            slot = self._take_slot()  # clean: near miss, goes back when the copy is refused, otherwise _evict_one() finds it
            if slot is None:
                return None
            if not self._copy_weights(slot, cfg):
                self.pool.release_slot(slot)
                return None
            slot.users = 1
            self._loaded[name] = slot
            return slot

    def unuse(self, slot: LoraSlot) -> None:
        with self._lock:  # clean: scoped
            slot.users -= 1

    def pin(self, name: str) -> bool:
        """Load an adapter for good; unpin() frees it."""
        cfg = read_config(self.root / name)
        if cfg is None:
            return False
        slot = self._take_slot()  # leak: forgotten when the weights do not fit
        if slot is None:
            return False
        if not self._copy_weights(slot, cfg):
            logger.warning("adapter %s: rank %d is over the maximum", name, cfg.rank)
            return False
        previous = self._pinned.pop(name, None)
        if previous is not None:
            self.pool.release_slot(previous)
        self._pinned[name] = slot
        return True

    def unpin(self, name: str) -> None:
        slot = self._pinned.pop(name, None)
        if slot is not None:
            self.pool.release_slot(slot)

    def reload(self, name: str) -> bool:
        """Load a new version of an adapter next to the old one, then switch."""
        self._lock.acquire()  # leak: the return without a free slot keeps the lock
        old = self._loaded.get(name)
        slot = self._take_slot()  # leak: the old slot is overwritten below and not released
        if slot is None:
            return False
        cfg = read_config(self.root / name)
        if cfg is None or not self._copy_weights(slot, cfg):
            self.pool.release_slot(slot)
            self._lock.release()
            return False
        if old is not None:
            slot.users = old.users
        self._loaded[name] = slot
        self._lock.release()
        return True

    def stats(self) -> dict[str, int]:
        if not self._lock.acquire(timeout=0.05):  # clean: near miss, the early return is the one without the lock
            return {}
        try:
            return {name: slot.users for name, slot in self._loaded.items()}
        finally:
            self._lock.release()
