"""Expert weights of a mixture model: device slots, pin counts while a batch runs, loads in the background."""
from __future__ import annotations

import heapq
import itertools
import logging
import threading
from dataclasses import dataclass, field
from typing import Optional

import torch

log = logging.getLogger("experts")

ExpertKey = tuple[int, int]


@dataclass(eq=False)
class ExpertSlot:
    index: int
    weight: torch.Tensor
    key: Optional[ExpertKey] = None
    pins: int = 0
    used_at: int = 0


@dataclass(order=True)
class LoadJob:
    priority: int
    seq: int
    key: ExpertKey = field(compare=False)
    slot: ExpertSlot = field(compare=False)


class SlotAllocator:
    """Raw slots, without knowledge of what lies in them."""

    def __init__(self, n: int, shape: tuple[int, ...]) -> None:
        self._free = [ExpertSlot(i, torch.empty(shape)) for i in range(n)]

    def grab(self) -> Optional[ExpertSlot]:
        return self._free.pop() if self._free else None

    def drop(self, slot: ExpertSlot) -> None:
        slot.key = None
        slot.pins = 0
        self._free.append(slot)


class ExpertCache:
    def __init__(self, alloc: SlotAllocator, host: dict[ExpertKey, torch.Tensor]) -> None:
        self.alloc = alloc
        self.host = host
        self.where: dict[ExpertKey, ExpertSlot] = {}
        self.jobs: list[LoadJob] = []
        self.clock = itertools.count()
        self.lock = threading.RLock()

    # -- residency -------------------------------------------------------------------------------

    def _room(self) -> Optional[ExpertSlot]:
        slot = self.alloc.grab()  # clean: handed on
        if slot is not None:
            return slot
        idle = [s for s in self.where.values() if s.pins == 0]
        if not idle:
            return None
        victim = min(idle, key=lambda s: s.used_at)
        del self.where[victim.key]
        victim.key = None
        return victim

    def ensure(self, key: ExpertKey) -> bool:
        if key in self.where:
            return True
        slot = self._room()  # clean: in the table of residents, evict drops it
        if slot is None:
            return False
        slot.weight.copy_(self.host[key])
        slot.key = key
        self.where[key] = slot
        return True

    def evict(self, key: ExpertKey) -> bool:
        slot = self.where.get(key)
        if slot is None or slot.pins:
            return False
        del self.where[key]
        self.alloc.drop(slot)
        return True

    def ensure_quantized(self, key: ExpertKey, scale: float) -> bool:
        if key in self.where:
            return True
        slot = self._room()  # leak: a host copy that is missing returns False without dropping the slot
        if slot is None:
            return False
        src = self.host.get(key)
        if src is None:
            log.warning("no host copy of %s", key)
            return False
        slot.weight.copy_(src * scale)
        slot.key = key
        self.where[key] = slot
        return True

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, key: ExpertKey) -> Optional[ExpertSlot]:
        with self.lock:
            if not self.ensure(key):
                return None
            slot = self.where[key]
            slot.pins += 1
            slot.used_at = next(self.clock)
            return slot

    def unpin(self, slot: ExpertSlot) -> None:
        with self.lock:
            slot.pins -= 1

    def pin_set(self, layer: int, experts: list[int]) -> Optional[list[ExpertSlot]]:
        held: list[ExpertSlot] = []
        for e in experts:
            slot = self.pin((layer, e))  # clean: handed on in the list, or unpinned in the rollback
            if slot is None:
                for s in held:
                    self.unpin(s)
                return None
            held.append(slot)
        return held

    # -- background loads ------------------------------------------------------------------------

    def schedule(self, key: ExpertKey, priority: int) -> bool:
        if key in self.where:
            return False
        slot = self._room()  # clean: near miss, in the job: a load makes it resident, cancel drops it
        if slot is None:
            return False
        heapq.heappush(self.jobs, LoadJob(priority, next(self.clock), key, slot))
        return True

    def run_jobs(self, budget: int) -> int:
        done = 0
        while self.jobs and done < budget:
            job = heapq.heappop(self.jobs)
            if job.key in self.where:
                self.alloc.drop(job.slot)
                continue
            job.slot.weight.copy_(self.host[job.key])
            job.slot.key = job.key
            self.where[job.key] = job.slot
            done += 1
        return done

    def cancel_jobs(self, layer: int) -> int:
        keep, gone = [], 0
        for job in self.jobs:
            if job.key[0] == layer:
                self.alloc.drop(job.slot)
                gone += 1
            else:
                keep.append(job)
        heapq.heapify(keep)
        self.jobs = keep
        return gone


class StagedLoader:
    """Loads into slots of its own, for the calibration pass."""

    def __init__(self, alloc: SlotAllocator, host: dict[ExpertKey, torch.Tensor]) -> None:
        self.alloc = alloc
        self.host = host
        self.staged: dict[ExpertKey, ExpertSlot] = {}

    def stage(self, key: ExpertKey) -> bool:
        if key in self.staged:
            return True
        slot = self.alloc.grab()  # leak: reset clears the table of staged slots and drops none
        if slot is None:
            return False
        slot.weight.copy_(self.host[key])
        self.staged[key] = slot
        return True

    def peek(self, key: ExpertKey) -> Optional[torch.Tensor]:
        slot = self.staged.get(key)
        return slot.weight if slot is not None else None

    def reset(self) -> None:
        log.debug("discarding %d staged experts", len(self.staged))
        self.staged.clear()


class MoELayer:
    def __init__(self, cache: ExpertCache, layer: int) -> None:
        self.cache = cache
        self.layer = layer
        self.shared: Optional[ExpertSlot] = None

    def forward(self, x: torch.Tensor, experts: list[int]) -> Optional[torch.Tensor]:
        slots = self.cache.pin_set(self.layer, experts)  # clean: each is unpinned in finally
        if slots is None:
            return None
        try:
            return sum((x @ s.weight for s in slots), torch.zeros_like(x))
        finally:
            for s in slots:
                self.cache.unpin(s)

    def forward_topk(self, x: torch.Tensor, experts: list[int], gates: list[float]) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, g in zip(experts, gates):
            slot = self.cache.pin((self.layer, e))  # leak: an expert with a closed gate is skipped while pinned
            if slot is None or g == 0.0:
                continue
            out += g * (x @ slot.weight)
            self.cache.unpin(slot)
        return out

    def forward_streamed(self, x: torch.Tensor, experts: list[int]) -> torch.Tensor:
        """The next expert is pinned while the current one computes."""
        out = torch.zeros_like(x)
        prev: Optional[ExpertSlot] = None
        for e in experts:
            slot = self.cache.pin((self.layer, e))  # clean: near miss, unpinned one round later or after the loop
            if prev is not None:
                out += x @ prev.weight
                self.cache.unpin(prev)
            prev = slot
        if prev is not None:
            out += x @ prev.weight
            self.cache.unpin(prev)
        return out

    def hottest(self, experts: list[int]) -> Optional[int]:
        slots = self.cache.pin_set(self.layer, experts)  # leak: all but the chosen one stay pinned
        if not slots:
            return None
        best = max(slots, key=lambda s: s.used_at)
        index = best.index
        self.cache.unpin(best)
        return index

    def attach_shared(self, expert: int) -> bool:
        self.detach_shared()
        self.shared = self.cache.pin((self.layer, expert))  # clean: near miss, the former one is detached first
        return self.shared is not None

    def detach_shared(self) -> None:
        if self.shared is not None:
            self.cache.unpin(self.shared)
            self.shared = None

    def norm(self, expert: int) -> float:
        slot = self.cache.pin((self.layer, expert))  # clean: unpinned before the last two returns
        if slot is None:
            return 0.0
        value = float(slot.weight.norm())
        self.cache.unpin(slot)
        if value != value:
            return 0.0
        return value
