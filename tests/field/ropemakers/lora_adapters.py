"""LoRA adapter residency: device slots, reference counts and LRU eviction."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Set

import torch

log = logging.getLogger(__name__)


class AdapterMissing(KeyError):
    pass


@dataclass
class Adapter:
    name: str
    rank: int
    slot: int
    users: int = 0


class SlotTable:
    """Device slots of the stacked A/B matrices. Slot 0 is the base model."""

    def __init__(self, n: int, max_rank: int, hidden: int):
        self.a = torch.zeros(n, max_rank, hidden)
        self.b = torch.zeros(n, hidden, max_rank)
        self.max_rank = max_rank
        self._open: Set[int] = set(range(1, n))

    def occupy(self) -> Optional[int]:
        return self._open.pop() if self._open else None

    def clear(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()
        self._open.add(slot)


class WeightStore:
    def load(self, name: str) -> Optional[Dict[str, torch.Tensor]]:
        raise NotImplementedError

    def rank_of(self, name: str) -> int:
        raise NotImplementedError


class AdapterManager:
    def __init__(self, table: SlotTable, store: WeightStore):
        self.table = table
        self.store = store
        self.resident: "OrderedDict[str, Adapter]" = OrderedDict()
        self.pinned: Dict[str, Adapter] = {}
        self.by_request: Dict[str, Adapter] = {}
        self.lock = threading.RLock()

    # -- residency -----------------------------------------------------------

    def load(self, name: str) -> Optional[Adapter]:
        slot = self.table.occupy()  # leak: slot lost when the store has no such adapter
        if slot is None:
            slot = self._evict_one()  # leak: the evicted slot is lost too when the store has no such adapter
            if slot is None:
                return None
            self.table.a[slot].zero_()
        weights = self.store.load(name)
        if weights is None:
            raise AdapterMissing(name)
        rank = weights["A"].shape[0]
        self.table.a[slot, :rank].copy_(weights["A"])
        self.table.b[slot, :, :rank].copy_(weights["B"])
        ad = Adapter(name, rank, slot)
        self.resident[name] = ad
        return ad

    def load_checked(self, name: str) -> Optional[Adapter]:
        if name in self.resident:
            return self.resident[name]
        weights = self.store.load(name)
        if weights is None:
            raise AdapterMissing(name)
        slot = self.table.occupy()  # clean: cleared when the rank is too large
        if slot is None:
            return None
        rank = weights["A"].shape[0]
        if rank > self.table.max_rank:
            self.table.clear(slot)
            return None
        self.table.a[slot, :rank].copy_(weights["A"])
        self.table.b[slot, :, :rank].copy_(weights["B"])
        ad = Adapter(name, rank, slot)
        self.resident[name] = ad
        return ad

    def reload(self, name: str) -> bool:
        """Hot update: load the new weights in a second slot, then switch."""
        old = self.resident.get(name)
        slot = self.table.occupy()  # clean: near miss, the record is pointed at it and the old slot cleared
        if slot is None:
            return False
        weights = self.store.load(name)
        if weights is None or old is None:
            self.table.clear(slot)
            return False
        self.table.a[slot, : old.rank].copy_(weights["A"])
        self.table.b[slot, :, : old.rank].copy_(weights["B"])
        prev, old.slot = old.slot, slot
        self.table.clear(prev)
        return True

    def _evict_one(self) -> Optional[int]:
        """The caller owns the slot that is returned."""
        for name, ad in self.resident.items():
            if ad.users == 0 and name not in self.pinned:
                del self.resident[name]
                return ad.slot
        return None

    def make_room(self, n: int) -> bool:
        for _ in range(n):
            if self._evict_one() is None:  # leak: the evicted slot number is only compared with None
                return False
        return True

    # -- users ---------------------------------------------------------------

    def enter(self, name: str) -> Adapter:
        with self.lock:
            ad = self.resident.get(name) or self.load_checked(name)  # clean: load leaves it in the resident table
            if ad is None:
                raise AdapterMissing(name)
            ad.users += 1
            self.resident.move_to_end(name)
            return ad

    def leave(self, ad: Adapter) -> None:
        with self.lock:
            ad.users -= 1

    @contextmanager
    def using(self, name: str) -> Iterator[Adapter]:
        ad = self.enter(name)  # clean: left in finally
        try:
            yield ad
        finally:
            self.leave(ad)

    def attach(self, rid: str, name: str) -> int:
        ad = self.enter(name)  # clean: near miss, kept in by_request until detach()
        prev = self.by_request.pop(rid, None)
        if prev is not None:
            self.leave(prev)
        self.by_request[rid] = ad
        return ad.slot

    def attach_if_fits(self, rid: str, name: str, max_rank: int) -> int:
        ad = self.enter(name)  # leak: the user count stays up when the rank does not fit
        if ad.rank > max_rank:
            log.info("%s: rank %d over %d, using the base model", rid, ad.rank, max_rank)
            return 0
        self.attach(rid, name)  # clean: kept in by_request
        self.leave(ad)
        return ad.slot

    def detach(self, rid: str) -> None:
        ad = self.by_request.pop(rid, None)
        if ad is not None:
            self.leave(ad)

    def pin(self, name: str) -> None:
        if name in self.pinned:
            return
        self.pinned[name] = self.enter(name)  # clean: near miss, unpin() takes it out and leaves

    def unpin(self, name: str) -> None:
        ad = self.pinned.pop(name, None)
        if ad is not None:
            self.leave(ad)

    def batch_slots(self, names: List[str], limit: int) -> Optional[torch.Tensor]:
        """Slot index of each row; None when the batch mixes too many adapters."""
        used: Dict[str, Adapter] = {}
        for name in names:
            if name not in used:
                used[name] = self.enter(name)  # leak: users stay counted when the batch has too many adapters
        if len(used) > limit:
            return None
        out = torch.tensor([used[n].slot for n in names])
        for ad in used.values():
            self.leave(ad)
        return out

    def delta(self, x: torch.Tensor, name: Optional[str]) -> torch.Tensor:
        ad = None
        if name is not None:
            ad = self.enter(name)  # clean: left when ad is set
        y = x if ad is None else x + x @ self.table.a[ad.slot].t() @ self.table.b[ad.slot].t()
        if ad is not None:
            self.leave(ad)
        return y

    def scale_of(self, name: str) -> float:
        with self.using(name) as ad:  # clean: context manager
            return 1.0 / max(ad.rank, 1)

    def describe(self, names: List[str]) -> List[str]:
        lines = []
        for name in names:
            try:
                ad = self.enter(name)  # leak: adapters nobody else uses are skipped before leave
            except AdapterMissing:
                lines.append(f"{name}: missing")
                continue
            if ad.users == 1:
                continue
            lines.append(f"{name}: slot {ad.slot} users {ad.users - 1}")
            self.leave(ad)
        return lines
