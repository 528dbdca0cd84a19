from __future__ import annotations
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Set, Tuple

import torch

logger = logging.getLogger(__name__)


class SlotsFull(Exception):
    pass


@dataclass
class LoRARequest:
    adapter_id: int
    rank: int
    path: str = ""


@dataclass
class LoadedAdapter:
    request: LoRARequest
    slot: int
    scaling: float = 1.0


class AdapterSlotTable:
    def __init__(self, max_loras: int, max_rank: int, hidden: int):
        self.a = torch.zeros(max_loras, max_rank, hidden)
        self.b = torch.zeros(max_loras, hidden, max_rank)
        self.max_rank = max_rank
        self._vacant: Set[int] = set(range(max_loras))

    def claim(self) -> int:
        if not self._vacant:
            raise SlotsFull()
        return self._vacant.pop()

    def claim_or_none(self) -> Optional[int]:
        return self._vacant.pop() if self._vacant else None

    def vacate(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()
        self._vacant.add(slot)


class AdapterManager:
    def __init__(self, table: AdapterSlotTable, capacity: int):
        self.table = table
        self.capacity = capacity
        self.active: "OrderedDict[int, LoadedAdapter]" = OrderedDict()
        self.default: Optional[int] = None

    def _weights(self, req: LoRARequest) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        if req.rank > self.table.max_rank:
            return None
        r, h = req.rank, self.table.a.shape[-1]
        return torch.randn(r, h) * 0.01, torch.zeros(h, r)

    def activate(self, req: LoRARequest) -> bool:
        if req.adapter_id in self.active:
            self.active.move_to_end(req.adapter_id)
            return True
        slot = self.table.claim_or_none()  # clean: near miss, evicts and retries, vacates on bad rank, else is kept in active
        if slot is None:
            if not self.evict_oldest():
                return False
            slot = self.table.claim()  # clean: same variable, same ends
        w = self._weights(req)
        if w is None:
            self.table.vacate(slot)
            return False
        self._copy(slot, req.rank, *w)
        self.active[req.adapter_id] = LoadedAdapter(req, slot)
        return True

    def activate_fast(self, req: LoRARequest) -> bool:
        slot = self.table.claim()  # leak: an adapter that is already active returns with a fresh slot claimed
        if req.adapter_id in self.active:
            self.active.move_to_end(req.adapter_id)
            return True
        w = self._weights(req)
        if w is None:
            self.table.vacate(slot)
            return False
        self._copy(slot, req.rank, *w)
        self.active[req.adapter_id] = LoadedAdapter(req, slot)
        return True

    def _copy(self, slot: int, rank: int, a: torch.Tensor, b: torch.Tensor) -> None:
        self.table.a[slot, :rank] = a
        self.table.b[slot, :, :rank] = b

    def evict_oldest(self) -> bool:
        if not self.active:
            return False
        _, ad = self.active.popitem(last=False)
        self.table.vacate(ad.slot)
        return True

    def deactivate(self, adapter_id: int) -> bool:
        ad = self.active.pop(adapter_id, None)
        if ad is None:
            return False
        self.table.vacate(ad.slot)
        return True

    def preload(self, reqs: Iterable[LoRARequest]) -> List[int]:
        slots: List[int] = []
        try:
            for r in reqs:
                slots.append(self.table.claim())  # leak: the handler returns an empty list over slots already claimed
        except SlotsFull:
            logger.error("preload needs more adapter slots")
            return []
        return slots

    def preload_all_or_none(self, reqs: List[LoRARequest]) -> Dict[int, int]:
        placed: Dict[int, int] = {}
        try:
            for r in reqs:
                if r.adapter_id in placed or r.adapter_id in self.active:
                    continue
                placed[r.adapter_id] = self.table.claim()  # clean: near miss, the handler vacates every placed slot
        except SlotsFull:
            for s in placed.values():
                self.table.vacate(s)
            return {}
        return placed

    def boot(self, reqs: List[LoRARequest]) -> int:
        placed = self.preload_all_or_none(reqs)  # clean: every placed slot enters active
        for r in reqs:
            if r.adapter_id in placed:
                self.active[r.adapter_id] = LoadedAdapter(r, placed[r.adapter_id])
        return len(placed)

    def benchmark(self, req: LoRARequest, x: torch.Tensor) -> Optional[float]:
        slot = self.table.claim()  # clean: vacated by both ends
        w = self._weights(req)
        if w is None:
            self.table.vacate(slot)
            return None
        self._copy(slot, req.rank, *w)
        y = x @ self.table.a[slot].t() @ self.table.b[slot].t()
        self.table.vacate(slot)
        return float(y.abs().mean())

    def merge(self, ids: List[int]) -> Optional[int]:
        target = self.table.claim()  # leak: an unknown id returns None with the target claimed
        for i in ids:
            ad = self.active.get(i)
            if ad is None:
                return None
            self.table.a[target] += self.table.a[ad.slot] / len(ids)
            self.table.b[target] += self.table.b[ad.slot] / len(ids)
        return target

    def set_default(self, ids: List[int]) -> None:
        merged = self.merge(ids)  # clean: the previous default is vacated and the field keeps the new one until close
        if merged is None:
            return
        if self.default is not None:
            self.table.vacate(self.default)
        self.default = merged

    def try_merge(self, ids: List[int]) -> bool:
        return self.merge(ids) is not None  # leak: the merged slot number is only compared

    def close(self) -> None:
        while self.evict_oldest():
            pass
        if self.default is not None:
            self.table.vacate(self.default)
            self.default = None
