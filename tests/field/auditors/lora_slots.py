from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Optional


@dataclass
class LoRAWeights:
    name: str
    rank: int
    pages: list[int] = field(default_factory=list)


class LoRAPagePool:
    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))

    def reserve(self, count: int) -> Optional[list[int]]:
        if count > len(self._free):
            return None
        pages = self._free[-count:] if count else []
        del self._free[len(self._free) - count :]
        return pages

    def restore(self, pages: list[int]) -> None:
        self._free.extend(pages)


class GPUSlotTable:
    def __init__(self, num_slots: int) -> None:
        self._owner: list[Optional[str]] = [None] * num_slots

    def claim(self, name: str) -> int:
        for idx, owner in enumerate(self._owner):
            if owner is None:
                self._owner[idx] = name
                return idx
        return -1

    def vacate(self, idx: int) -> None:
        self._owner[idx] = None


class AdapterRefs:
    def __init__(self) -> None:
        self._count: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def retain(self, name: str) -> int:
        with self._lock:
            self._count[name] += 1
            return self._count[name]

    def drop(self, name: str) -> int:
        with self._lock:
            self._count[name] -= 1
            return self._count[name]

    def busy(self, name: str) -> bool:
        return self._count.get(name, 0) > 0


class LoRAManager:
    def __init__(self, pages: LoRAPagePool, slots: GPUSlotTable, max_rank: int) -> None:
        self.pages = pages
        self.slots = slots
        self.refs = AdapterRefs()
        self.max_rank = max_rank
        self.cpu: OrderedDict[str, LoRAWeights] = OrderedDict()
        self.active: OrderedDict[str, int] = OrderedDict()
        self.merged: Optional[list[int]] = None

    def load(self, name: str, rank: int) -> Optional[LoRAWeights]:
        if name in self.cpu:
            self.cpu.move_to_end(name)
            return self.cpu[name]
        pages = self.pages.reserve(rank)  # leak: an adapter over max_rank is refused after its pages were reserved
        if pages is None:
            return None
        if rank > self.max_rank:
            return None
        weights = LoRAWeights(name, rank, pages)
        self.cpu[name] = weights
        return weights

    def reload(self, name: str, rank: int) -> bool:
        weights = self.cpu.get(name)
        if weights is None:
            return False
        fresh = self.pages.reserve(rank)  # clean: near miss, the old pages are restored before the field is replaced
        if fresh is None:
            return False
        old, weights.pages = weights.pages, fresh
        self.pages.restore(old)
        weights.rank = rank
        return True

    def grow(self, name: str, extra: int) -> bool:
        weights = self.cpu.get(name)
        if weights is None:
            return False
        more = self.pages.reserve(extra)  # clean: joins the adapter's page list, which unload restores
        if more is None:
            return False
        weights.pages += more
        weights.rank += extra
        return True

    def merge(self, rank: int) -> bool:
        self.merged = self.pages.reserve(rank)  # leak: a second merge overwrites the pages of the one before
        return self.merged is not None

    def unmerge(self) -> None:
        if self.merged is not None:
            self.pages.restore(self.merged)
            self.merged = None

    def activate(self, name: str) -> bool:
        if name in self.active:
            self.active.move_to_end(name)
            return True
        slot = self.slots.claim(name)  # clean: near miss, -1 means nothing was claimed and the retry after eviction is the one kept
        if slot < 0:
            if not self._evict_one():
                return False
            slot = self.slots.claim(name)  # clean: recorded in active, deactivate vacates it
        self.active[name] = slot
        return True

    def _evict_one(self) -> bool:
        for name in list(self.active):
            if not self.refs.busy(name):
                self.deactivate(name)
                return True
        return False

    def deactivate(self, name: str) -> None:
        slot = self.active.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)

    def unload(self, name: str) -> bool:
        if self.refs.busy(name):
            return False
        self.deactivate(name)
        weights = self.cpu.pop(name, None)
        if weights is not None:
            self.pages.restore(weights.pages)
        return True

    def prefetch(self, names: list[str], rank: int) -> int:
        done = 0
        for name in names:
            probe = self.pages.reserve(rank)  # clean: near miss, only a probe for room, restored at once
            if probe is None:
                break
            self.pages.restore(probe)
            if self.load(name, rank) is not None:  # clean: near miss, the adapter stays in the cpu cache, which owns it
                done += 1
        return done


@dataclass
class LoRARequest:
    request_id: str
    adapter: Optional[str]
    finished: bool = False
    aborted: bool = False


class LoRABatcher:
    def __init__(self, manager: LoRAManager) -> None:
        self.manager = manager
        self.running: dict[str, LoRARequest] = {}

    def start(self, req: LoRARequest) -> bool:
        if req.adapter is not None:
            self.manager.refs.retain(req.adapter)  # leak: when activation fails the request is turned away still counted
            if not self.manager.activate(req.adapter):  # clean: the slot stays the manager's until eviction or unload
                return False
        self.running[req.request_id] = req
        return True

    def warmup(self, name: str) -> bool:
        self.manager.refs.retain(name)  # clean: near miss, dropped on the one way out whether or not activation worked
        ok = self.manager.activate(name)  # clean: near miss, the active table owns the slot after warmup
        self.manager.refs.drop(name)
        return ok

    def step(self) -> None:
        for rid in list(self.running):
            req = self.running[rid]
            if req.finished or req.aborted:
                del self.running[rid]
                if req.adapter is not None:
                    self.manager.refs.drop(req.adapter)
