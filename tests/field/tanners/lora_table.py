"""LoRA adapter table: weights live in a few device slots, requests pin what they use."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

logger = logging.getLogger("lora")


class AdapterMissing(KeyError):
    pass


@dataclass
class Adapter:
    name: str
    rank: int
    slot: Optional[int] = None
    pins: int = 0


@dataclass
class LoraRequest:
    rid: str
    adapter: Optional[str]
    prompt: str = ""
    pinned: Optional[Adapter] = None
    extra: List[Adapter] = field(default_factory=list)


class SlotBank:
    def __init__(self, n: int) -> None:
        self._open = list(range(n))

    def obtain(self) -> Optional[int]:
        return self._open.pop() if self._open else None

    def surrender(self, slot: int) -> None:
        self._open.append(slot)


class AdapterTable:
    def __init__(self, bank: SlotBank, catalog: Dict[str, int]) -> None:
        self.bank = bank
        self.catalog = dict(catalog)
        self._loaded: "OrderedDict[str, Adapter]" = OrderedDict()
        self._mu = threading.Lock()

    # ---- pins --------------------------------------------------------------
    def pin(self, name: str) -> Adapter:
        """Load if needed and raise the pin count; unpin() when the request is done."""
        with self._mu:
            ad = self._loaded.get(name)
            if ad is None:
                ad = self._load(name)  # clean: entered in the table of loaded adapters
            self._loaded.move_to_end(name)
            ad.pins += 1
            return ad

    def try_pin(self, name: str) -> Optional[Adapter]:
        try:
            return self.pin(name)  # clean: wrapper, handed to the caller
        except (AdapterMissing, MemoryError):
            return None

    def unpin(self, ad: Adapter) -> None:
        with self._mu:
            ad.pins -= 1

    # ---- loading -----------------------------------------------------------
    def _load(self, name: str) -> Adapter:
        rank = self.catalog.get(name)
        if rank is None:
            raise AdapterMissing(name)
        slot = self.bank.obtain()  # clean: near miss, second try after None, kept in the adapter
        if slot is None:
            self._evict_idle()
            slot = self.bank.obtain()  # clean: kept in the adapter, surrendered on eviction
        if slot is None:
            raise MemoryError("all adapter slots are pinned")
        ad = Adapter(name, rank, slot)
        self._loaded[name] = ad
        return ad

    def _evict_idle(self) -> bool:
        for name, ad in self._loaded.items():
            if ad.pins == 0:
                del self._loaded[name]
                self.bank.surrender(ad.slot)
                return True
        return False

    def preload(self, names: Sequence[str]) -> int:
        """Warm-up at start; stops at the first adapter that is too large."""
        n = 0
        for name in names:
            slot = self.bank.obtain()  # leak: too large a rank breaks with the slot in hand
            if slot is None:
                break
            rank = self.catalog.get(name, 0)
            if rank > 64:
                logger.warning("adapter %s: rank %d", name, rank)
                break
            if name in self._loaded:
                self.bank.surrender(slot)
                continue
            self._loaded[name] = Adapter(name, rank, slot)
            n += 1
        return n

    def reload(self, name: str) -> bool:
        """New weights for an adapter: fill a second slot, then switch over."""
        ad = self._loaded.get(name)
        if ad is None:
            return False
        fresh = self.bank.obtain()  # clean: either surrendered or takes the adapter's field
        if fresh is None:
            return False
        if ad.pins:
            self.bank.surrender(fresh)
            return False
        old, ad.slot = ad.slot, fresh
        self.bank.surrender(old)
        return True

    def hot_swap(self, name: str, rank: int) -> Optional[Adapter]:
        slot = self.bank.obtain()  # clean: kept by the new entry, surrendered when the old one is pinned
        if slot is None:
            return None
        prev = self._loaded.get(name)
        if prev is not None:
            if prev.pins > 0:
                self.bank.surrender(slot)
                return None
            self.bank.surrender(prev.slot)
        self.catalog[name] = rank
        self._loaded[name] = Adapter(name, rank, slot)
        return self._loaded[name]


# ---- users -----------------------------------------------------------------
class LoraBatcher:
    def __init__(self, table: AdapterTable, max_adapters: int = 8) -> None:
        self.table = table
        self.max_adapters = max_adapters
        self.running: Dict[str, LoraRequest] = {}

    def admit(self, req: LoraRequest) -> bool:
        if req.adapter is not None:
            req.pinned = self.table.try_pin(req.adapter)  # clean: travels in the request, retire() unpins
            if req.pinned is None:
                return False
        self.running[req.rid] = req
        return True

    def admit_many(self, reqs: Sequence[LoraRequest]) -> List[str]:
        taken: List[str] = []
        for req in reqs:
            if req.adapter is None:
                self.running[req.rid] = req
                continue
            ad = self.table.try_pin(req.adapter)  # leak: over the adapter limit the pin is skipped by continue
            if ad is None:
                continue
            distinct = {r.adapter for r in self.running.values()} | {req.adapter}
            if len(distinct) > self.max_adapters:
                continue
            req.pinned = ad
            self.running[req.rid] = req
            taken.append(req.rid)
        return taken

    def retire(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            return
        if req.pinned is not None:
            self.table.unpin(req.pinned)
            req.pinned = None
        for ad in req.extra:
            self.table.unpin(ad)
        req.extra.clear()

    def switch_adapter(self, rid: str, name: str) -> bool:
        """A session may change persona between turns."""
        req = self.running[rid]
        ad = self.table.try_pin(name)  # clean: near miss, the former pin is dropped before the field is overwritten
        if ad is None:
            return False
        if req.pinned is not None:
            self.table.unpin(req.pinned)
        req.pinned, req.adapter = ad, name
        return True

    def compose(self, rid: str, names: Sequence[str]) -> bool:
        """Stack several adapters on one request, all or none."""
        got: List[Adapter] = []
        for name in names:
            ad = self.table.try_pin(name)  # clean: near miss, rolled back through the list
            if ad is None:
                for g in reversed(got):
                    self.table.unpin(g)
                return False
            got.append(ad)
        self.running[rid].extra.extend(got)
        return True

    def blend(self, a: str, b: str) -> Optional[float]:
        left = self.table.try_pin(a)  # leak: stays pinned when b cannot be had
        right = self.table.try_pin(b)  # leak: stays pinned when a cannot be had
        if left is None or right is None:
            return None
        ratio = left.rank / max(1, right.rank)
        self.table.unpin(left)
        self.table.unpin(right)
        return ratio

    def rank_of(self, name: str) -> int:
        ad = self.table.try_pin(name)  # clean: near miss, finally with None check
        try:
            return 0 if ad is None else ad.rank
        finally:
            if ad is not None:
                self.table.unpin(ad)

    def validate(self, names: Sequence[str]) -> Dict[str, bool]:
        """Which adapters could be served right now."""
        return {n: self.table.try_pin(n) is not None for n in names}  # leak: pinned just to see whether it works
