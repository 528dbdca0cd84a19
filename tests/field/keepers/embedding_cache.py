"""Device-side cache of embedding rows with pinned slots and write-back of dirty rows."""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Dict, Iterable, List, Optional, Sequence

import torch


class RowSlots:
    def __init__(self, slots: int, dim: int, device: str) -> None:
        self.weight = torch.zeros(slots, dim, device=device)
        self._free: List[int] = list(range(slots))

    def take(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def take_many(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        got = self._free[-n:] if n else []
        del self._free[len(self._free) - n:]
        return got


class EmbeddingCache:
    def __init__(self, table: torch.Tensor, slots: int, device: str) -> None:
        self.table = table
        self.rows = RowSlots(slots, table.shape[1], device)
        self.entries: "OrderedDict[int, Dict[str, Any]]" = OrderedDict()
        self.ghost: Dict[int, int] = {}
        self.lock = threading.Lock()

    def _evict_one(self) -> bool:
        for key, ent in self.entries.items():
            if ent["pins"] == 0:
                if ent["dirty"]:
                    self.table[key].copy_(self.rows.weight[ent["slot"]])
                del self.entries[key]
                self.rows.give(ent["slot"])
                return True
        return False

    def _slot(self) -> Optional[int]:
        slot = self.rows.take()  # clean: returned, or None before anything is evicted
        if slot is None and self._evict_one():
            slot = self.rows.take()  # clean: near miss, reached only when the first take gave nothing
        return slot

    def pin(self, key: int) -> Optional[int]:
        ent = self.entries.get(key)
        if ent is None:
            slot = self._slot()  # clean: near miss, owned by the entry, _evict_one gives it
            if slot is None:
                return None
            self.rows.weight[slot].copy_(self.table[key])
            ent = self.entries[key] = {"slot": slot, "pins": 0, "dirty": False}
        ent["pins"] += 1
        self.entries.move_to_end(key)
        return ent["slot"]

    def unpin(self, key: int, dirty: bool = False) -> None:
        ent = self.entries[key]
        ent["pins"] -= 1
        ent["dirty"] = ent["dirty"] or dirty

    def lookup(self, keys: Sequence[int]) -> Optional[torch.Tensor]:
        pinned: List[int] = []
        out = []
        for key in keys:
            slot = self.pin(key)  # clean: near miss, a miss in the middle unpins the keys before it
            if slot is None:
                for done in pinned:
                    self.unpin(done)
                return None
            pinned.append(key)
            out.append(self.rows.weight[slot].clone())
        for key in pinned:
            self.unpin(key)
        return torch.stack(out)

    def update(self, keys: Sequence[int], grads: torch.Tensor, lr: float) -> bool:
        slots: List[int] = []
        for key in keys:
            slot = self.pin(key)  # leak: rows pinned before the one that did not fit keep their pin
            if slot is None:
                return False
            slots.append(slot)
        for key, slot, grad in zip(keys, slots, grads):
            self.rows.weight[slot].sub_(lr * grad)
            self.unpin(key, dirty=True)
        return True

    def dedup_sum(self, keys: Sequence[int]) -> torch.Tensor:
        total = torch.zeros(self.table.shape[1], device=self.rows.weight.device)
        for key in keys:
            slot = self.pin(key)  # leak: a key met twice is pinned twice, but unpinned once from the set
            if slot is None:
                total += self.table[key].to(total.device)
                continue
            total += self.rows.weight[slot]
        for key in set(keys):
            if key in self.entries:
                self.unpin(key)
        return total

    def unique_sum(self, keys: Sequence[int]) -> torch.Tensor:
        total = torch.zeros(self.table.shape[1], device=self.rows.weight.device)
        held: List[int] = []
        for key in dict.fromkeys(keys):
            slot = self.pin(key)  # clean: near miss, keys are unique here and each held one is unpinned
            if slot is None:
                total += self.table[key].to(total.device)
                continue
            held.append(key)
            total += self.rows.weight[slot]
        for key in held:
            self.unpin(key)
        return total

    def preload(self, keys: Iterable[int]) -> int:
        n = 0
        for key in keys:
            if self.pin(key) is None:  # clean: unpinned at the end of the turn, None holds nothing
                break
            n += 1
            self.unpin(key)
        return n

    def zero_row(self, key: int) -> bool:
        slot = self.pin(key)  # leak: a row that is zero already returns with the pin
        if slot is None:
            return False
        row = self.rows.weight[slot]
        if not bool(row.any()):
            return True
        row.zero_()
        self.unpin(key, dirty=True)
        return True

    def scratch_sum(self, grads: torch.Tensor) -> Optional[torch.Tensor]:
        slots = self.rows.take_many(grads.shape[0])  # clean: all of them are given in the loop
        if slots is None:
            return None
        self.rows.weight[slots] = grads
        result = self.rows.weight[slots].sum(0)
        for slot in slots:
            self.rows.give(slot)
        return result

    def scratch_topk(self, grads: torch.Tensor, k: int) -> Optional[torch.Tensor]:
        slots = self.rows.take_many(grads.shape[0])  # leak: only the first k slots are given
        if slots is None:
            return None
        self.rows.weight[slots] = grads
        best = self.rows.weight[slots].norm(dim=1).topk(k).indices
        for slot in slots[:k]:
            self.rows.give(slot)
        return best

    def remember(self, key: int) -> bool:
        slot = self.rows.take()  # leak: close gives the entries' slots but forgets those in ghost
        if slot is None:
            return False
        old = self.ghost.pop(key, None)
        if old is not None:
            self.rows.give(old)
        self.rows.weight[slot].copy_(self.table[key])
        self.ghost[key] = slot
        return True

    def close(self) -> None:
        for key, ent in self.entries.items():
            if ent["dirty"]:
                self.table[key].copy_(self.rows.weight[ent["slot"]])
            self.rows.give(ent["slot"])
        self.entries.clear()
        self.ghost.clear()
