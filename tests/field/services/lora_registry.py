"""LoRA adapters: slots on the device, reference counts per adapter."""
import logging
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set

logger = logging.getLogger(__name__)


class AdapterError(Exception):
    pass


@dataclass
class Adapter:
    name: str
    rank: int
    refs: int = 0
    slot: Optional[int] = None


class SlotSource(ABC):
    @abstractmethod
    def assign(self) -> int: ...

    @abstractmethod
    def unassign(self, slot: int) -> None: ...


class DeviceSlots(SlotSource):
    def __init__(self, n: int) -> None:
        self._avail: Set[int] = set(range(n))

    def assign(self) -> int:
        if not self._avail:
            raise AdapterError("no adapter slot")
        return self._avail.pop()  # clean: handed out

    def unassign(self, slot: int) -> None:
        self._avail.add(slot)


class Registry:
    def __init__(self, slots: DeviceSlots) -> None:
        self.slots = slots
        self.adapters: Dict[str, Adapter] = {}
        self.mu = threading.Lock()

    def inc_ref(self, name: str) -> Adapter:
        ad = self.adapters[name]
        ad.refs += 1
        return ad

    def dec_ref(self, name: str) -> None:
        self.adapters[name].refs -= 1

    def load(self, name: str, rank: int) -> Adapter:
        if name in self.adapters:
            return self.adapters[name]
        slot = self.slots.assign()  # clean: in the adapter table, unload() unassigns
        ad = Adapter(name, rank, slot=slot)
        self.adapters[name] = ad
        return ad

    def load_checked(self, name: str, rank: int, max_rank: int) -> Adapter:
        slot = self.slots.assign()  # leak: the rank check raises with the slot assigned
        if rank > max_rank:
            raise AdapterError(f"rank {rank} > {max_rank}")
        self.unload(name)
        ad = Adapter(name, rank, slot=slot)
        self.adapters[name] = ad
        return ad

    def unload(self, name: str) -> None:
        ad = self.adapters.pop(name, None)
        if ad is None or ad.slot is None:
            return
        self.slots.unassign(ad.slot)
        ad.slot = None

    def clear(self) -> None:
        for name in list(self.adapters):
            self.unload(name)

    def swap(self, old: str, new: str, rank: int) -> Adapter:
        slot = self.slots.assign()  # clean: near miss, the early return unassigns it
        if new in self.adapters:
            self.slots.unassign(slot)
            return self.adapters[new]
        self.unload(old)
        self.adapters[new] = Adapter(new, rank, slot=slot)
        return self.adapters[new]


@dataclass
class LoraRequest:
    rid: str
    adapter: Optional[str]
    extras: Dict[str, Any] = field(default_factory=dict)


class Runner:
    def __init__(self, reg: Registry, model: Any) -> None:
        self.reg = reg
        self.model = model
        self.active: List[LoraRequest] = []

    def run(self, req: LoraRequest) -> Any:
        if req.adapter is not None:
            self.reg.inc_ref(req.adapter)  # clean: near miss, both guards test req.adapter
        out = self.model(req.extras)
        if req.adapter is not None:
            self.reg.dec_ref(req.adapter)
        return out

    def run_cached(self, req: LoraRequest, cache: Dict[str, Any]) -> Any:
        if req.adapter is None:
            return self.model(req.extras)
        ad = self.reg.inc_ref(req.adapter)  # leak: a cache hit returns with the reference
        key = f"{ad.name}:{req.rid}"
        if key in cache:
            return cache[key]
        cache[key] = self.model(req.extras)
        self.reg.dec_ref(req.adapter)
        return cache[key]

    def run_quiet(self, req: LoraRequest) -> Any:
        assert req.adapter is not None
        self.reg.inc_ref(req.adapter)  # leak: rank 0 raises, the handler returns None, no dec_ref
        try:
            if self.reg.adapters[req.adapter].rank == 0:
                raise AdapterError("empty adapter")
            out = self.model(req.extras)
        except AdapterError as exc:
            logger.warning("%s: %s", req.rid, exc)
            return None
        self.reg.dec_ref(req.adapter)
        return out

    def begin(self, req: LoraRequest) -> None:
        if req.adapter:
            self.reg.inc_ref(req.adapter)  # clean: the request is active, end() and abort_all() drop the reference
        self.active.append(req)

    def end(self, req: LoraRequest) -> None:
        self.active.remove(req)
        if req.adapter:
            self.reg.dec_ref(req.adapter)

    def abort_all(self) -> None:
        for req in list(self.active):
            self.end(req)

    def names(self) -> List[str]:
        self.reg.mu.acquire()  # clean: released before the return
        out = sorted(self.reg.adapters)
        self.reg.mu.release()
        return out

    def rank_of(self, name: str) -> int:
        self.reg.mu.acquire()  # leak: an unknown name returns with the lock held
        ad = self.reg.adapters.get(name)
        if ad is None:
            return 0
        rank = ad.rank
        self.reg.mu.release()
        return rank

    def pin_all(self, reqs: List[LoraRequest]) -> int:
        n = 0
        for r in reqs:
            if r.adapter is None:
                continue
            self.reg.inc_ref(r.adapter)  # clean: near miss, the loop over the same requests below drops each
            n += 1
        self.model([r.extras for r in reqs])
        for r in reqs:
            if r.adapter is None:
                continue
            self.reg.dec_ref(r.adapter)
        return n

    def merge(self, a: str, b: str) -> Optional[int]:
        first = self.reg.inc_ref(a)  # leak: equal ranks drop both references, unequal ranks only that of b
        second = self.reg.inc_ref(b)  # clean: dropped in either case
        if first.rank != second.rank:
            self.reg.dec_ref(b)
            return None
        self.reg.dec_ref(b)
        self.reg.dec_ref(a)
        return first.rank
