"""LoRA adapter slots on the device and the manager which fills them."""
from __future__ import annotations

from collections import OrderedDict

import torch


class SlotTable:
    """Owns `n` weight slots; a slot is claimed and later vacated."""

    def __init__(self, n: int):
        self._vacant = set(range(n))
        self._rank_limit = 64

    def claim(self) -> int:
        """Return a slot index, or -1 when every slot is taken."""
        if not self._vacant:
            return -1
        slot = self._vacant.pop()  # clean: the slot index is returned
        return slot

    def vacate(self, slot: int) -> None:
        self._vacant.add(slot)

    def __len__(self) -> int:
        return len(self._vacant)


class AdapterManager:
    def __init__(self, slots: SlotTable, weights: torch.Tensor):
        self.slots = slots
        self.weights = weights
        self.active: OrderedDict[int, int] = OrderedDict()
        self.pinned: dict[int, int] = {}
        self.warmup_slot = -1
        self.max_rank = 64

    def activate(self, lora_id: int, rank: int, a: torch.Tensor) -> bool:
        if lora_id in self.active:
            self.active.move_to_end(lora_id)
            return True
        slot = self.slots.claim()  # leak: a rank above the limit returns False with the slot still claimed
        if slot < 0:
            if not self._evict_one():
                return False
            slot = self.slots.claim()  # leak: same rank check, same lost slot after eviction
        if rank > self.max_rank:
            return False
        self.weights[slot, :rank].copy_(a)
        self.active[lora_id] = slot
        return True

    def _evict_one(self) -> bool:
        if not self.active:
            return False
        _, slot = self.active.popitem(last=False)
        self.slots.vacate(slot)
        return True

    def deactivate(self, lora_id: int) -> bool:
        slot = self.active.pop(lora_id, None)
        if slot is None:
            return False
        self.slots.vacate(slot)
        return True

    def pin(self, lora_id: int, a: torch.Tensor) -> bool:
        if lora_id in self.pinned:
            return True
        if lora_id in self.active:
            self.pinned[lora_id] = self.active.pop(lora_id)
            return True
        slot = self.slots.claim()  # clean: near miss, moved into `pinned` which unpin() and reset() vacate
        if slot == -1:
            return False
        self.weights[slot, : a.shape[0]].copy_(a)
        self.pinned[lora_id] = slot
        return True

    def unpin(self, lora_id: int) -> None:
        slot = self.pinned.pop(lora_id, -1)
        if slot >= 0:
            self.slots.vacate(slot)

    def swap_in_place(self, lora_id: int, a: torch.Tensor) -> None:
        """Load a new version of an adapter beside the old one, then switch."""
        old = self.active.get(lora_id)
        new = self.slots.claim()  # clean: near miss, the old slot it replaces is vacated first
        if new < 0:
            return
        self.weights[new, : a.shape[0]].copy_(a)
        if old is not None:
            self.slots.vacate(old)
        self.active[lora_id] = new

    def hot_reload(self, lora_id: int, a: torch.Tensor) -> None:
        new = self.slots.claim()  # leak: the slot stored before under this id is overwritten without vacating it
        if new < 0:
            return
        self.weights[new, : a.shape[0]].copy_(a)
        self.active[lora_id] = new

    def profile(self, ranks: list[int]) -> list[float]:
        out = []
        for r in ranks:
            slot = self.slots.claim()  # clean: vacated at the end of each round, break only without a slot
            if slot < 0:
                break
            out.append(float(self.weights[slot, :r].norm()))
            self.slots.vacate(slot)
        return out

    def start_warmup(self) -> bool:
        if self.warmup_slot >= 0:
            return True
        self.warmup_slot = self.slots.claim()  # clean: near miss, the guard stops a second claim and end_warmup() vacates
        return self.warmup_slot >= 0

    def end_warmup(self) -> None:
        if self.warmup_slot < 0:
            return
        self.slots.vacate(self.warmup_slot)
        self.warmup_slot = -1

    def merge(self, ids: list[int], out: torch.Tensor) -> bool:
        base = self.slots.claim()  # leak: returning on an inactive adapter leaves the scratch slot claimed
        if base < 0:
            return False
        self.weights[base].zero_()
        for i in ids:
            slot = self.active.get(i)
            if slot is None:
                return False
            self.weights[base].add_(self.weights[slot])
        out.copy_(self.weights[base])
        self.slots.vacate(base)
        return True

    def reset(self) -> None:
        while self._evict_one():
            pass
        for lora_id in list(self.pinned):
            self.unpin(lora_id)
        self.end_warmup()
