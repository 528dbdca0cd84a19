"""LRU cache of offloaded experts with explicit locks and use counts."""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Dict, List, Optional


class Expert:
    def __init__(self, eid: int) -> None:
        self.eid = eid
        self.uses = 0
        self.loaded = False
        self.broken = False

    def __call__(self, x: int) -> int:
        return x * (self.eid + 1)


class ExpertCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._mu = threading.Lock()
        self._io = threading.Lock()
        self._lru: "OrderedDict[int, Expert]" = OrderedDict()
        self.hits: Dict[int, int] = {}

    def pin(self, eid: int) -> Optional[Expert]:
        with self._mu:
            exp = self._lru.get(eid)
            if exp is None:
                if len(self._lru) >= self.capacity and not self._evict():
                    return None
                exp = self._lru[eid] = Expert(eid)
            self._lru.move_to_end(eid)
            exp.uses += 1
            return exp

    def unpin(self, exp: Expert) -> None:
        with self._mu:
            exp.uses -= 1

    def _evict(self) -> bool:
        for eid, exp in self._lru.items():
            if exp.uses == 0:
                del self._lru[eid]
                return True
        return False

    def load(self, exp: Expert) -> bool:
        self._io.acquire()  # leak: returns with the lock held when the expert is already loaded
        if exp.loaded:
            return True
        exp.loaded = True
        self._io.release()
        return True

    def reload(self, exp: Expert) -> bool:
        self._io.acquire()  # clean: near miss, early return inside try, finally releases
        try:
            if exp.broken:
                return False
            exp.loaded = True
            return True
        finally:
            self._io.release()

    def try_load(self, exp: Expert) -> bool:
        if not self._io.acquire(blocking=False):  # clean: near miss, the return is the failed arm
            return False
        exp.loaded = True
        self._io.release()
        return True

    def try_unload(self, exp: Expert) -> bool:
        got = self._io.acquire(timeout=0.1)  # leak: an expert in use returns with the lock held
        if not got or exp.uses:
            return False
        exp.loaded = False
        self._io.release()
        return True

    def bump(self, eids: List[int]) -> None:
        for eid in eids:
            self._mu.acquire()  # leak: continue skips the release
            if eid not in self._lru:
                continue
            self.hits[eid] = self.hits.get(eid, 0) + 1
            self._mu.release()


class MoEOffloadLayer:
    def __init__(self, cache: ExpertCache) -> None:
        self.cache = cache
        self.active: Dict[int, Expert] = {}
        self.shared: Optional[Expert] = None
        self.fallback: Optional[Expert] = None

    def forward(self, x: int, eids: List[int]) -> int:
        out = 0
        for eid in eids:
            exp = self.cache.pin(eid)  # leak: broken experts are skipped while pinned
            if exp is None:
                continue
            if exp.broken:
                continue
            out += exp(x)
            self.cache.unpin(exp)
        return out

    def forward_pinned(self, x: int, eids: List[int]) -> int:
        pinned: List[Expert] = []
        for eid in eids:
            exp = self.cache.pin(eid)  # clean: collected in pinned, unpinned in the second loop
            if exp is not None:
                pinned.append(exp)
        out = 0
        for exp in pinned:
            if not exp.broken:
                out += exp(x)
            self.cache.unpin(exp)
        return out

    def activate(self, eid: int) -> bool:
        if eid in self.active:
            return True
        exp = self.cache.pin(eid)  # clean: kept in active until deactivate
        if exp is None:
            return False
        self.active[eid] = exp
        return True

    def deactivate(self, eid: int) -> None:
        exp = self.active.pop(eid, None)
        if exp is not None:
            self.cache.unpin(exp)

    def set_fallback(self, eid: int) -> None:
        self.fallback = self.cache.pin(eid)  # leak: a second call overwrites the expert pinned before

    def switch_shared(self, eid: int) -> bool:
        exp = self.cache.pin(eid)  # clean: near miss, the old one is unpinned before the overwrite
        if exp is None:
            return False
        if self.shared is not None:
            self.cache.unpin(self.shared)
        self.shared = exp
        return True

    def close(self) -> None:
        for eid in list(self.active):
            self.deactivate(eid)
        if self.shared is not None:
            self.cache.unpin(self.shared)
            self.shared = None
        if self.fallback is not None:
            self.cache.unpin(self.fallback)
            self.fallback = None

    def blend(self, x: int, a: int, b: int) -> Optional[int]:
        ea = self.cache.pin(a)  # leak: stays pinned when b cannot be pinned
        if ea is None:
            return None
        eb = self.cache.pin(b)  # clean: unpinned below
        if eb is None:
            return None
        y = ea(x) + eb(x)
        self.cache.unpin(eb)
        self.cache.unpin(ea)
        return y


if __name__ == "__main__":
    c = ExpertCache(3)
    layer = MoEOffloadLayer(c)
    layer.forward_pinned(2, [0, 1])
    layer.activate(1)
    layer.deactivate(1)
    assert layer.blend(1, 0, 1) == 3
