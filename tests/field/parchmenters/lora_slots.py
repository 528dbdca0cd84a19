"""GPU slots for LoRA adapters that rollout policies are sampled with.

Layers, from the bottom: SlotTable (numbers), AdapterCache (loaded adapters with
users counted, LRU among the unused), QuotaCache (per-experiment quota on top).
"""
from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Callable


class SlotTable:
    def __init__(self, n: int):
        self._vacant = set(range(n))

    def occupy(self) -> int | None:
        if not self._vacant:
            return None
        return self._vacant.pop()  # clean: returned to the caller

    def empty_out(self, slot: int) -> None:
        self._vacant.add(slot)


@dataclass
class Adapter:
    name: str
    slot: int
    users: int = 0


class AdapterCache:
    def __init__(self, table: SlotTable, load: Callable[[str, int], bool]):
        self.table = table
        self.load = load
        self._by_name: OrderedDict[str, Adapter] = OrderedDict()
        self._mu = threading.RLock()

    def _slot(self) -> int | None:
        slot = self.table.occupy()  # clean: near miss, rebound only when it is None
        if slot is None and self._drop_unused():
            slot = self.table.occupy()  # clean: returned to the caller
        return slot

    def _drop_unused(self) -> bool:
        for name, ad in self._by_name.items():
            if ad.users == 0:
                del self._by_name[name]
                self.table.empty_out(ad.slot)
                return True
        return False

    def use(self, name: str) -> Adapter | None:
        """Count one more user of the adapter, loading it first when needed."""
        with self._mu:
            ad = self._by_name.get(name)
            if ad is None:
                slot = self._slot()  # leak: stays occupied when the adapter cannot be loaded
                if slot is None:
                    return None
                if not self.load(name, slot):
                    return None
                ad = self._by_name[name] = Adapter(name, slot)
            ad.users += 1
            self._by_name.move_to_end(name)
            return ad

    def reload(self, name: str) -> bool:
        """New weights for an adapter: a second slot is filled, then the first is let go."""
        with self._mu:
            ad = self._by_name.get(name)
            if ad is None or ad.users:
                return False
            fresh = self._slot()  # clean: near miss, it replaces the old number, which is emptied out
            if fresh is None:
                return False
            if not self.load(name, fresh):
                self.table.empty_out(fresh)
                return False
            self.table.empty_out(ad.slot)
            ad.slot = fresh
            return True

    def unuse(self, ad: Adapter) -> None:
        with self._mu:
            ad.users -= 1


class QuotaCache:
    """AdapterCache with a limit on the adapters an experiment uses at once."""

    def __init__(self, inner: AdapterCache, quota: int):
        self.inner = inner
        self.quota = quota
        self._spent: Counter = Counter()

    def _charge(self, exp: str) -> bool:
        if self._spent[exp] >= self.quota:
            return False
        self._spent[exp] += 1
        return True

    def _credit(self, exp: str) -> None:
        self._spent[exp] -= 1

    def use(self, exp: str, name: str) -> Adapter | None:
        if not self._charge(exp):  # leak: no credit when the inner cache has no adapter to give
            return None
        return self.inner.use(name)  # clean: returned to the caller

    def try_use(self, exp: str, name: str) -> Adapter | None:
        ad = self.inner.use(name)  # clean: near miss, unused again when the quota is spent
        if ad is None:
            return None
        if not self._charge(exp):  # clean: it goes with the adapter that is returned
            self.inner.unuse(ad)
            return None
        return ad

    def unuse(self, exp: str, ad: Adapter) -> None:
        self.inner.unuse(ad)
        self._credit(exp)


def with_adapter(cache: AdapterCache, name: str):
    """Decorator: the function gets the slot as its first argument."""

    def deco(fn):
        @functools.wraps(fn)
        def inner(*args, **kw):
            ad = cache.use(name)  # clean: unused in finally
            if ad is None:
                raise LookupError(name)
            try:
                return fn(ad.slot, *args, **kw)
            finally:
                cache.unuse(ad)
        return inner
    return deco


@dataclass
class PolicyRequest:
    rid: str
    adapter_name: str | None
    adapter: Adapter | None = None


class PolicyBatcher:
    def __init__(self, cache: AdapterCache):
        self.cache = cache
        self.live: dict[str, PolicyRequest] = {}

    def add(self, req: PolicyRequest) -> bool:
        if req.adapter_name is not None:
            req.adapter = self.cache.use(req.adapter_name)  # clean: near miss, remove() unuses it under the same condition
            if req.adapter is None:
                return False
        self.live[req.rid] = req
        return True

    def remove(self, rid: str) -> None:
        req = self.live.pop(rid)
        if req.adapter_name is not None:
            self.cache.unuse(req.adapter)
            req.adapter = None

    def pin_all(self, names: list[str]) -> dict[str, Adapter] | None:
        got: dict[str, Adapter] = {}
        for name in names:
            ad = self.cache.use(name)  # leak: adapters already in got stay used when a later one is missing
            if ad is None:
                return None
            got[name] = ad
        return got

    def unpin(self, pinned: dict[str, Adapter]) -> None:
        while pinned:
            _, ad = pinned.popitem()
            self.cache.unuse(ad)

    def best_slot(self, names: list[str], score: Callable[[int], float]) -> Adapter | None:
        """The best scored adapter, in use for the caller."""
        best, top = None, float("-inf")
        for name in names:
            ad = self.cache.use(name)  # clean: near miss, the loser of each comparison is unused
            if ad is None:
                continue
            s = score(ad.slot)
            loser = ad
            if s > top:
                best, loser, top = ad, best, s
            if loser is not None:
                self.cache.unuse(loser)
        return best

    def rotate(self, req: PolicyRequest, name: str) -> bool:
        """Sample the rest of the request with another policy."""
        ad = self.cache.use(name)  # clean: in the request, remove() unuses it
        if ad is None:
            return False
        if req.adapter is not None:
            self.cache.unuse(req.adapter)
        req.adapter, req.adapter_name = ad, name
        return True

    def warm_then(self, name: str, ready: Callable[[int], bool]) -> bool:
        ad = self.cache.use(name)  # leak: not unused when the slot does not get ready
        if ad is None or not ready(ad.slot):
            return False
        self.cache.unuse(ad)
        return True
