"""Sharded embedding cache for recommender training. Rows are reference counted while a batch uses them."""
from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Sequence, Set

import torch
from torch import nn


class RowCache:
    def __init__(self, capacity: int, dim: int) -> None:
        self.table = torch.zeros(capacity, dim)
        self._slot_of: Dict[int, int] = {}
        self._refs: List[int] = [0] * capacity
        self._free: List[int] = list(range(capacity))

    def add_ref(self, key: int) -> int:
        """Slot of the key with its count raised, -1 when nothing can be evicted."""
        slot = self._slot_of.get(key)
        if slot is None:
            slot = self._make_room()
            if slot < 0:
                return -1
            self._slot_of[key] = slot
        self._refs[slot] += 1
        return slot

    def release_ref(self, slot: int) -> None:
        self._refs[slot] -= 1

    def _make_room(self) -> int:
        if self._free:
            return self._free.pop()  # clean: handed to add_ref, which enters it in the map
        for key, slot in self._slot_of.items():
            if self._refs[slot] == 0:
                del self._slot_of[key]
                return slot
        return -1


class CachedEmbedding(nn.Module):
    def __init__(self, cache: RowCache, backing: torch.Tensor, train_mode: str = "sync") -> None:
        super().__init__()
        self.cache = cache
        self.backing = backing
        self.train_mode = train_mode
        self._batch_slots: List[int] = []
        self._dirty: Set[int] = set()

    def begin_batch(self, keys: Iterable[int]) -> bool:
        for k in keys:
            slot = self.cache.add_ref(k)  # clean: collected on the module, end_batch releases, also after a miss
            if slot < 0:
                self.end_batch()
                return False
            self._batch_slots.append(slot)
        return True

    def end_batch(self) -> None:
        for s in self._batch_slots:
            self.cache.release_ref(s)
        self._batch_slots.clear()

    def lookup(self, keys: Sequence[int]) -> Optional[torch.Tensor]:
        slots: List[int] = []
        for k in keys:
            s = self.cache.add_ref(k)  # leak: a miss in the middle returns with the earlier rows referenced
            if s < 0:
                return None
            slots.append(s)
        out = self.cache.table[slots].clone()
        for s in slots:
            self.cache.release_ref(s)
        return out

    def lookup_or_backing(self, keys: Sequence[int]) -> torch.Tensor:
        rows = []
        for k in keys:
            s = self.cache.add_ref(k)  # clean: near miss, a miss has no reference to release
            if s < 0:
                rows.append(self.backing[k])
                continue
            rows.append(self.cache.table[s].clone())
            self.cache.release_ref(s)
        return torch.stack(rows)

    def pooled(self, keys: Sequence[int]) -> torch.Tensor:
        slots = [self.cache.add_ref(k) for k in keys]  # leak: set() merges repeated keys, one release for several references
        out = self.cache.table[slots].mean(0)
        for s in set(slots):
            self.cache.release_ref(s)
        return out

    def pooled_unique(self, keys: Sequence[int]) -> torch.Tensor:
        slots = [self.cache.add_ref(k) for k in set(keys)]  # clean: near miss, keys are unique before the references are taken
        out = self.cache.table[slots].mean(0)
        for s in set(slots):
            self.cache.release_ref(s)
        return out

    def update(self, key: int, grad: torch.Tensor, lr: float) -> None:
        s = self.cache.add_ref(key)  # leak: in the async mode the slot is marked dirty but flush does not release it
        self.cache.table[s].sub_(grad, alpha=lr)
        if self.train_mode == "async":
            self._dirty.add(s)
        else:
            self.backing[key].copy_(self.cache.table[s])
            self.cache.release_ref(s)

    def flush(self) -> int:
        n = len(self._dirty)
        self._dirty = set()
        return n

    def update_now(self, key: int, grad: torch.Tensor, lr: float) -> None:
        s = self.cache.add_ref(key)  # clean: near miss, both modes release the reference
        self.cache.table[s].sub_(grad, alpha=lr)
        if self.train_mode == "async":
            self.cache.release_ref(s)
            return
        self.backing[key].copy_(self.cache.table[s])
        self.cache.release_ref(s)

    def norm(self, key: int, default: float = 0.0) -> float:
        s = self.cache.add_ref(key)  # leak: rows with zero norm return the default without a release
        if s < 0:
            return default
        n = float(self.cache.table[s].norm())
        if n == 0.0:
            return default
        self.cache.release_ref(s)
        return n

    def touch(self, keys: Iterable[int]) -> None:
        for k in keys:
            self.cache.add_ref(k)  # leak: result discarded, the count only goes up


def hot_rows(emb: CachedEmbedding, keys: Sequence[int], n: int) -> List[int]:
    emb.begin_batch(keys)
    hot = sorted(emb._batch_slots, key=lambda s: -float(emb.cache.table[s].norm()))[:n]
    emb.end_batch()
    return hot
