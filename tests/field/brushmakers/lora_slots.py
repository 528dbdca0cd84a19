"""LoRA adapter slots on the GPU: an LRU of loaded adapters over a bitmask of slots."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

log = logging.getLogger("serve.lora")


class AdapterLoadError(Exception):
    pass


class SlotMask:
    """Slots as bits of an int. -1 means that every slot is taken."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.bits = (1 << n) - 1

    def claim(self) -> int:
        if not self.bits:
            return -1
        low = self.bits & -self.bits
        self.bits ^= low
        return low.bit_length() - 1

    def unclaim(self, slot: int) -> None:
        self.bits |= 1 << slot


class Adapter:
    def __init__(self, name: str, rank: int, weights) -> None:
        self.name = name
        self.rank = rank
        self.weights = weights
        self.slot = -1
        self.users = 0


class AdapterTable:
    def __init__(self, n_slots: int, max_rank: int, store) -> None:
        self.mask = SlotMask(n_slots)
        self.max_rank = max_rank
        self.store = store
        self.loaded: "OrderedDict[str, Adapter]" = OrderedDict()
        self.lock = threading.Lock()

    def _evict_one(self) -> bool:
        for name, ad in self.loaded.items():
            if ad.users == 0:
                del self.loaded[name]
                self.mask.unclaim(ad.slot)
                ad.slot = -1
                return True
        return False

    def _slot(self) -> int:
        slot = self.mask.claim()  # clean: returned, or it was -1
        if slot < 0 and self._evict_one():
            slot = self.mask.claim()  # clean: near miss, the first claim gave nothing
        return slot

    def load(self, name: str) -> Optional[Adapter]:
        if name in self.loaded:
            self.loaded.move_to_end(name)
            return self.loaded[name]
        slot = self._slot()  # leak: an adapter of too high a rank returns None with its slot claimed
        if slot < 0:
            return None
        try:
            weights, rank = self.store.fetch(name)
        except AdapterLoadError:
            self.mask.unclaim(slot)
            return None
        if rank > self.max_rank:
            log.error("adapter %s has rank %d > %d", name, rank, self.max_rank)
            return None
        ad = Adapter(name, rank, weights)
        ad.slot = slot
        self.loaded[name] = ad
        return ad

    def reload(self, name: str) -> bool:
        """Load new weights into a second slot, then switch over."""
        old = self.loaded.get(name)
        fresh = self._slot()  # leak: an unknown name returns after the slot is claimed
        if fresh < 0:
            return False
        if old is None:
            return False
        try:
            weights, rank = self.store.fetch(name)
        except AdapterLoadError:
            self.mask.unclaim(fresh)
            return False
        retired, old.slot = old.slot, fresh
        old.weights, old.rank = weights, rank
        self.mask.unclaim(retired)
        return True

    def checkout(self, name: str) -> Optional[Adapter]:
        with self.lock:
            ad = self.load(name)
            if ad is None:
                return None
            ad.users += 1
            return ad

    def checkin(self, ad: Adapter) -> None:
        with self.lock:
            ad.users -= 1

    @contextmanager
    def using(self, name: str) -> Iterator[Optional[Adapter]]:
        ad = self.checkout(name)  # clean: checked in by the finally
        try:
            yield ad
        finally:
            if ad is not None:
                self.checkin(ad)

    def unload(self, name: str) -> None:
        ad = self.loaded.pop(name, None)
        if ad is not None and ad.slot >= 0:
            self.mask.unclaim(ad.slot)
            ad.slot = -1


class LoraBatcher:
    """Groups the requests of one step by adapter."""

    def __init__(self, table: AdapterTable, max_loras: int) -> None:
        self.table = table
        self.max_loras = max_loras
        self.active: Dict[str, Adapter] = {}

    def begin_step(self, requests: List) -> List:
        taken = []
        for req in requests:
            if req.lora is None or req.lora in self.active:
                taken.append(req)
                continue
            if len(self.active) >= self.max_loras:
                continue
            ad = self.table.checkout(req.lora)  # clean: held in self.active until end_step()
            if ad is None:
                continue
            self.active[req.lora] = ad
            taken.append(req)
        return taken

    def end_step(self) -> None:
        while self.active:
            _, ad = self.active.popitem()
            self.table.checkin(ad)

    def run_single(self, req, engine):
        ad = self.table.checkout(req.lora)  # leak: a prompt past the context window returns an error response early
        if ad is None:
            return None
        if len(req.tokens) > engine.max_len:
            return engine.error(req, "prompt too long")
        try:
            return engine.forward(req, ad.slot)
        finally:
            self.table.checkin(ad)

    def score_all(self, names: List[str], engine) -> Dict[str, float]:
        out = {}
        for name in names:
            with self.table.using(name) as ad:  # clean: the context manager checks it in, also past the continue
                if ad is None:
                    continue
                out[name] = engine.score(ad.slot)
        return out

    def merge_pair(self, a: str, b: str, engine) -> bool:
        left = self.table.checkout(a)  # leak: kept when the second adapter cannot be had
        if left is None:
            return False
        right = self.table.checkout(b)  # clean: checked in together with the first
        if right is None:
            return False
        try:
            engine.merge(left.weights, right.weights)
        finally:
            self.table.checkin(right)
            self.table.checkin(left)
        return True

    def switch(self, req, new_name: str) -> bool:
        ad = self.table.checkout(new_name)  # clean: near miss, the old one is checked in and the new one goes to req.adapter
        if ad is None:
            return False
        prev, req.adapter = req.adapter, ad
        if prev is not None:
            self.table.checkin(prev)
        return True

    def finish(self, req) -> None:
        if req.adapter is not None:
            self.table.checkin(req.adapter)
            req.adapter = None

    def first_available(self, names: List[str]) -> Optional[Adapter]:
        best: Optional[Adapter] = None
        for name in names:
            ad = self.table.checkout(name)  # leak: a better candidate overwrites the one held so far
            if ad is None:
                continue
            if best is None or ad.rank > best.rank:
                best = ad
            else:
                self.table.checkin(ad)
        return best
