"""LoRA adapters in GPU slots: pins while a batch uses them, LRU eviction otherwise."""
from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Set


@dataclass
class Adapter:
    name: str
    rank: int
    slot: int = -1
    pins: int = 0
    weights: Optional[bytearray] = None


class SlotsFull(RuntimeError):
    pass


class AdapterCache:
    def __init__(self, slots: int, loader: Callable[[str], Optional[bytes]], max_rank: int = 64):
        self._free: List[int] = list(range(slots))
        self._resident: "OrderedDict[str, Adapter]" = OrderedDict()
        self._loader = loader
        self.max_rank = max_rank
        self._lock = threading.RLock()

    def pinned(self) -> int:
        return sum(a.pins for a in self._resident.values())

    # -- slots -----------------------------------------------------------
    def _take_slot(self) -> Optional[int]:
        if self._free:
            return self._free.pop()
        for name, a in self._resident.items():
            if a.pins == 0:
                del self._resident[name]
                return a.slot
        return None

    def _return_slot(self, slot: int) -> None:
        self._free.append(slot)

    def _load(self, name: str, rank: int) -> Optional[Adapter]:
        slot = self._take_slot()  # leak: an adapter the loader does not know loses its slot
        if slot is None:
            raise SlotsFull(name)
        weights = self._loader(name)
        if weights is None:
            return None
        adapter = Adapter(name, rank, slot, weights=bytearray(weights))
        self._resident[name] = adapter
        return adapter

    def preload(self, name: str, rank: int) -> bool:
        if name in self._resident:
            return True
        slot = self._take_slot()  # clean: near miss, given back by the handler and on the rank check, else resident
        if slot is None:
            return False
        try:
            weights = self._loader(name)
        except OSError:
            self._return_slot(slot)
            return False
        if weights is None or rank > self.max_rank:
            self._return_slot(slot)
            return False
        self._resident[name] = Adapter(name, rank, slot, weights=bytearray(weights))
        return True

    # -- pins ------------------------------------------------------------
    def pin(self, name: str, rank: int = 8) -> Optional[Adapter]:
        with self._lock:
            adapter = self._resident.get(name)
            if adapter is None:
                adapter = self._load(name, rank)  # clean: near miss, the slot stays with the resident adapter until eviction
                if adapter is None:
                    return None
            self._resident.move_to_end(name)
            adapter.pins += 1
            return adapter

    def unpin(self, adapter: Adapter) -> None:
        with self._lock:
            adapter.pins -= 1

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[Optional[Adapter]]:
        adapter = self.pin(name)  # clean: near miss, None needs no unpin
        try:
            yield adapter
        finally:
            if adapter is not None:
                self.unpin(adapter)

    def pin_all(self, names: List[str]) -> Optional[List[Adapter]]:
        out: List[Adapter] = []
        for name in names:
            adapter = self.pin(name)  # leak: an unknown name returns None with the earlier ones pinned
            if adapter is None:
                return None
            out.append(adapter)
        return out

    def resize_rank(self, name: str, rank: int) -> bool:
        self._lock.acquire()  # leak: the early return for an adapter not resident keeps the lock
        adapter = self._resident.get(name)
        if adapter is None:
            return False
        adapter.rank = min(rank, self.max_rank)
        self._lock.release()
        return True

    def drop(self, name: str) -> bool:
        self._lock.acquire()  # clean: near miss, both returns go through the finally
        try:
            adapter = self._resident.get(name)
            if adapter is None or adapter.pins:
                return False
            del self._resident[name]
            self._return_slot(adapter.slot)
            return True
        finally:
            self._lock.release()


@dataclass
class Request:
    rid: int
    adapter_name: Optional[str] = None
    adapter: Optional[Adapter] = None
    tokens: int = 0
    error: str = ""


class BatchBuilder:
    def __init__(self, cache: AdapterCache, max_adapters: int = 2):
        self.cache = cache
        self.max_adapters = max_adapters
        self.active: Dict[int, Request] = {}
        self._by_adapter: Dict[str, List[Adapter]] = defaultdict(list)

    # -- requests --------------------------------------------------------
    def add(self, req: Request) -> bool:
        if req.adapter_name is not None:
            req.adapter = self.cache.pin(req.adapter_name)  # clean: near miss, complete unpins whenever the request has one
            if req.adapter is None:
                req.error = "unknown adapter"
                return False
        self.active[req.rid] = req
        return True

    def complete(self, rid: int) -> None:
        req = self.active.pop(rid)
        if req.adapter is not None:
            self.cache.unpin(req.adapter)
            req.adapter = None

    def add_limited(self, req: Request) -> bool:
        req.adapter = self.cache.pin(req.adapter_name or "base")  # leak: a refused request keeps the pin and never becomes active
        if req.adapter is None:
            return False
        names = {r.adapter.name for r in self.active.values() if r.adapter is not None}
        if req.adapter.name not in names and len(names) >= self.max_adapters:
            req.error = "too many adapters"
            return False
        self.active[req.rid] = req
        return True

    def switch(self, rid: int, name: str) -> bool:
        req = self.active[rid]
        new = self.cache.pin(name)  # clean: replaces the old one, complete unpins it
        if new is None:
            return False
        old, req.adapter = req.adapter, new
        if old is not None:
            self.cache.unpin(old)
        return True

    def reroute(self, rid: int, name: str) -> bool:
        req = self.active[rid]
        adapter = self.cache.pin(name)  # leak: the same adapter again returns without dropping the second pin
        if adapter is None:
            return False
        if adapter is req.adapter:
            return True
        if req.adapter is not None:
            self.cache.unpin(req.adapter)
        req.adapter = adapter
        return True

    # -- batches ---------------------------------------------------------
    def group(self, reqs: List[Request]) -> Dict[str, List[Request]]:
        groups: Dict[str, List[Request]] = {}
        for req in reqs:
            name = req.adapter_name or "base"
            adapter = self.cache.pin(name)  # clean: near miss, kept in the per-adapter lists, ungroup unpins every entry
            if adapter is None:
                continue
            self._by_adapter[name].append(adapter)
            groups.setdefault(name, []).append(req)
        return groups

    def ungroup(self) -> None:
        for held in self._by_adapter.values():
            for adapter in held:
                self.cache.unpin(adapter)
        self._by_adapter.clear()

    def max_rank_of(self, names: Set[str]) -> int:
        best: Optional[Adapter] = None
        for name in names:
            adapter = self.cache.pin(name)  # leak: those below the best so far stay pinned
            if adapter is None:
                continue
            if best is None or adapter.rank > best.rank:
                if best is not None:
                    self.cache.unpin(best)
                best = adapter
        rank = best.rank if best is not None else 0
        if best is not None:
            self.cache.unpin(best)
        return rank

    def total_bytes(self, names: Set[str]) -> int:
        total = 0
        for name in names:
            with self.cache.using(name) as adapter:  # clean: near miss, continue inside the with unpins
                if adapter is None or adapter.weights is None:
                    continue
                total += len(adapter.weights)
        return total

    def merge(self, names: List[str]) -> Optional[bytearray]:
        adapters = self.cache.pin_all(names)  # leak: the mixed-rank return leaves them pinned
        if adapters is None:
            return None
        if len({a.rank for a in adapters}) > 1:
            return None
        out = bytearray(max(len(a.weights) for a in adapters))
        for a in adapters:
            for i, v in enumerate(a.weights):
                out[i] = (out[i] + v) & 0xFF
            self.cache.unpin(a)
        return out


if __name__ == "__main__":
    cache = AdapterCache(3, lambda n: None if n.startswith("?") else n.encode())
    b = BatchBuilder(cache)
    b.add(Request(1, "aa")), b.add(Request(2)), b.switch(1, "bb"), b.complete(1), b.complete(2)
    b.group([Request(3, "aa"), Request(4, "aa"), Request(5)]), b.ungroup()
    print(b.total_bytes({"aa", "bb"}), b.merge(["aa", "bb"]), cache.preload("aa", 1))
    print(cache.drop("aa"), cache.pinned())
