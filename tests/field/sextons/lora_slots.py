from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch


class LoRASlotTable:
    """Device slots for adapter weights, with reference counts per adapter."""

    def __init__(self, max_loras: int, rank: int, hidden: int) -> None:
        self.a = torch.zeros(max_loras, rank, hidden, device="cuda")
        self.b = torch.zeros(max_loras, hidden, rank, device="cuda")
        self._free = list(range(max_loras))
        self._slot_of: dict[str, int] = {}
        self._refs: dict[str, int] = {}
        self._stamp: dict[str, float] = {}

    def resident(self, name: str) -> bool:
        return name in self._slot_of

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        idle = [n for n, c in self._refs.items() if c == 0]
        if not idle:
            return None
        victim = min(idle, key=self._stamp.__getitem__)
        del self._refs[victim], self._stamp[victim]
        return self._slot_of.pop(victim)

    def activate(self, name: str, weights: dict[str, torch.Tensor]) -> int | None:
        slot = self._slot_of.get(name)
        if slot is None:
            slot = self._take_slot()  # leak: an adapter of too high a rank is refused after its slot was taken
            if slot is None:
                return None
            rank = weights["a"].shape[0]
            if rank > self.a.shape[1]:
                return None
            self.a[slot, :rank].copy_(weights["a"])
            self.b[slot, :, :rank].copy_(weights["b"])
            self._slot_of[name] = slot
            self._refs[name] = 0
        self._refs[name] += 1
        self._stamp[name] = time.monotonic()
        return slot

    def deactivate(self, name: str) -> None:
        self._refs[name] -= 1


class AdapterRegistry:
    def __init__(self) -> None:
        self._weights: dict[str, dict[str, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def register(self, name: str, path: str) -> None:
        weights = torch.load(path, map_location="cpu")
        with self._lock:
            self._weights[name] = weights

    def fetch(self, name: str) -> dict[str, torch.Tensor] | None:
        with self._lock:
            return self._weights.get(name)


@dataclass
class Sequence:
    sid: int
    adapter: str | None
    tokens: list[int]
    lora_slot: int = -1
    finished: bool = False
    meta: dict[str, Any] = field(default_factory=dict)


class LoRAManager:
    def __init__(self, table: LoRASlotTable, registry: AdapterRegistry, max_batch: int) -> None:
        self.table = table
        self.registry = registry
        self.max_batch = max_batch
        self.active: dict[int, Sequence] = {}

    def _hold(self, name: str) -> int | None:
        weights = self.registry.fetch(name)
        if weights is None:
            return None
        return self.table.activate(name, weights)  # clean: handed to the caller

    def start(self, seq: Sequence) -> bool:
        if seq.adapter is None:
            self.active[seq.sid] = seq
            return True
        slot = self._hold(seq.adapter)  # leak: a full batch refuses the sequence and keeps the reference
        if slot is None:
            return False
        if len(self.active) >= self.max_batch:
            return False
        seq.lora_slot = slot
        self.active[seq.sid] = seq
        return True

    def start_group(self, seqs: list[Sequence]) -> bool:
        started: list[Sequence] = []
        for seq in seqs:
            if seq.adapter is not None:
                slot = self._hold(seq.adapter)  # clean: near miss, all those started are undone when one fails
                if slot is None:
                    for s in started:
                        self.finish(s)
                    return False
                seq.lora_slot = slot
            self.active[seq.sid] = seq
            started.append(seq)
        return True

    def finish(self, seq: Sequence) -> None:
        self.active.pop(seq.sid, None)
        if seq.lora_slot >= 0:
            self.table.deactivate(seq.adapter)
            seq.lora_slot = -1
        seq.finished = True

    def switch(self, seq: Sequence, name: str) -> bool:
        slot = self._hold(name)  # clean: near miss, the old adapter is let go right after the new one is held
        if slot is None:
            return False
        if seq.lora_slot >= 0:
            self.table.deactivate(seq.adapter)
        seq.adapter, seq.lora_slot = name, slot
        return True

    def resume(self, seq: Sequence, state: dict[str, Any]) -> None:
        if seq.sid in self.active or seq.lora_slot >= 0:
            return
        name = state.get("adapter")
        seq.tokens = state["tokens"]
        if name is None:
            self.active[seq.sid] = seq
            return
        slot = self._hold(name)  # clean: near miss, None means nothing held; otherwise finish lets go
        if slot is not None:
            seq.adapter, seq.lora_slot = name, slot
            self.active[seq.sid] = seq

    def merge_into(self, name: str, target: torch.Tensor, scale: float) -> bool:
        slot = self._hold(name)  # leak: zero scale returns early with the adapter still held
        if slot is None:
            return False
        if scale == 0.0:
            return True
        target.add_(self.table.b[slot] @ self.table.a[slot], alpha=scale)
        self.table.deactivate(name)
        return True

    def preload(self, names: list[str]) -> int:
        count = 0
        for name in names:
            if self.table.resident(name):
                continue
            if self._hold(name) is None:  # clean: near miss, deactivated at once, the slot stays warm
                break
            self.table.deactivate(name)
            count += 1
        return count

    def norms(self, names: list[str]) -> dict[str, float]:
        out: dict[str, float] = {}
        for name in names:
            slot = self._hold(name)  # clean: near miss, the finally lets go also for zero norms
            if slot is None:
                continue
            try:
                norm = float(self.table.a[slot].norm())
                if norm == 0.0:
                    continue
                out[name] = norm
            finally:
                self.table.deactivate(name)
        return out

    def pair_similarity(self, left: str, right: str) -> float | None:
        a = self._hold(left)  # leak: not let go when the right adapter cannot be held
        b = self._hold(right)  # clean: near miss, when a is missing b is let go
        if a is None:
            if b is not None:
                self.table.deactivate(right)
            return None
        if b is None:
            return None
        sim = torch.cosine_similarity(self.table.a[a].flatten(), self.table.a[b].flatten(), dim=0)
        self.table.deactivate(left)
        self.table.deactivate(right)
        return float(sim)
