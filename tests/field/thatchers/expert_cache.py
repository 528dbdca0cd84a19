"""Device cache for MoE experts streamed from host memory."""
import logging
import threading
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch

LOG = logging.getLogger("moe.cache")


class ExpertKey(NamedTuple):
    layer: int
    expert: int


class Slot:
    def __init__(self, index: int, weight: torch.Tensor):
        self.index = index
        self.weight = weight
        self.key: Optional[ExpertKey] = None
        self.readers = 0


class ExpertCache:
    def __init__(self, host: Dict[ExpertKey, torch.Tensor], slots: int, shape: Tuple[int, int], device: str = "cuda"):
        self.host = host
        self.blank: List[Slot] = [Slot(i, torch.empty(shape, device=device)) for i in range(slots)]
        self.resident: Dict[ExpertKey, Slot] = {}
        self.mu = threading.RLock()

    def _vacant_slot(self) -> Optional[Slot]:
        if self.blank:
            return self.blank.pop()
        for key, slot in self.resident.items():
            if slot.readers == 0:
                del self.resident[key]
                return slot
        return None

    def enter(self, key: ExpertKey) -> Optional[Slot]:
        """Pin the expert for reading; None when unknown or every slot is being read."""
        with self.mu:
            slot = self.resident.get(key)
            if slot is None:
                slot = self._vacant_slot()  # leak: an expert unknown to the host table returns None with the slot out of both tables
                if slot is None:
                    return None
                src = self.host.get(key)
                if src is None:
                    return None
                slot.weight.copy_(src)
                slot.key = key
                self.resident[key] = slot
            slot.readers += 1
            return slot

    def leave(self, slot: Slot) -> None:
        with self.mu:
            slot.readers -= 1

    def enter_if_resident(self, key: ExpertKey) -> Optional[Slot]:
        with self.mu:
            slot = self.resident.get(key)
            if slot is not None:
                slot.readers += 1
            return slot

    def preload(self, keys: Iterable[ExpertKey]) -> int:
        n = 0
        for key in keys:
            with self.mu:
                if key in self.resident or key not in self.host:
                    continue
                slot = self._vacant_slot()  # clean: near miss, it goes to the resident table, host was checked before
                if slot is None:
                    break
                slot.weight.copy_(self.host[key])
                slot.key = key
                self.resident[key] = slot
                n += 1
        return n

    def replace(self, key: ExpertKey, weight: torch.Tensor) -> bool:
        with self.mu:
            self.host[key] = weight
            slot = self._vacant_slot()  # leak: the resident slot of the same key is overwritten and returns nowhere
            if slot is None:
                return False
            slot.weight.copy_(weight)
            slot.key = key
            self.resident[key] = slot
            return True

    def flush(self) -> int:
        with self.mu:
            idle = [k for k, s in self.resident.items() if s.readers == 0]
            for k in idle:
                self.blank.append(self.resident.pop(k))
            return len(idle)


class MoELayer:
    def __init__(self, layer: int, cache: ExpertCache, top_k: int):
        self.layer = layer
        self.cache = cache
        self.top_k = top_k
        self.sticky: Dict[int, Slot] = {}
        self.shared: Optional[Slot] = None

    def forward(self, x: torch.Tensor, experts: List[int], gates: List[float]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, g in zip(experts, gates):
            slot = self.cache.enter(ExpertKey(self.layer, e))  # leak: a gate below the threshold continues past leave
            if slot is None:
                continue
            if g < 1e-4:
                continue
            out.add_(x @ slot.weight, alpha=g)
            self.cache.leave(slot)
        return out

    def forward_grouped(self, x: torch.Tensor, experts: List[int], gates: List[float]) -> Optional[torch.Tensor]:
        got: List[Slot] = []
        for e in experts[: self.top_k]:
            slot = self.cache.enter(ExpertKey(self.layer, e))  # clean: near miss, the set is left also when it stays incomplete
            if slot is None:
                for s in got:
                    self.cache.leave(s)
                return None
            got.append(slot)
        out = sum(g * (x @ s.weight) for s, g in zip(got, gates))
        for s in got:
            self.cache.leave(s)
        return out

    def stick(self, expert: int) -> bool:
        if expert in self.sticky:
            return True
        slot = self.cache.enter(ExpertKey(self.layer, expert))  # clean: near miss, unstick() and close() leave it
        if slot is None:
            return False
        self.sticky[expert] = slot
        return True

    def unstick(self, expert: int) -> None:
        slot = self.sticky.pop(expert, None)
        if slot is not None:
            self.cache.leave(slot)

    def retarget_shared(self, expert: int) -> bool:
        slot = self.cache.enter(ExpertKey(self.layer, expert))  # leak: the same expert again returns early and stays pinned twice
        if slot is None:
            return False
        if self.shared is slot:
            return True
        if self.shared is not None:
            self.cache.leave(self.shared)
        self.shared = slot
        return True

    def peek_norm(self, expert: int) -> float:
        slot = self.cache.enter_if_resident(ExpertKey(self.layer, expert))  # clean: left before the value is returned
        if slot is None:
            return 0.0
        norm = slot.weight.norm().item()
        self.cache.leave(slot)
        return norm

    def hottest(self, counts: Dict[int, int]) -> Optional[torch.Tensor]:
        best: Optional[Slot] = None
        for e in sorted(counts, key=counts.__getitem__, reverse=True):
            best = self.cache.enter_if_resident(ExpertKey(self.layer, e))  # clean: near miss, the loop ends at the first hit, which is left below
            if best is not None:
                break
        if best is None:
            return None
        weight = best.weight.clone()
        self.cache.leave(best)
        return weight

    def average(self, experts: List[int]) -> Optional[torch.Tensor]:
        acc: Optional[torch.Tensor] = None
        slots = [self.cache.enter_if_resident(ExpertKey(self.layer, e)) for e in experts]  # leak: one absent expert makes the call return with the others pinned
        if any(s is None for s in slots):
            return None
        for s in slots:
            acc = s.weight.clone() if acc is None else acc.add_(s.weight)
            self.cache.leave(s)
        return acc

    def close(self) -> None:
        for e in list(self.sticky):
            self.unstick(e)
        if self.shared is not None:
            self.cache.leave(self.shared)
            self.shared = None
