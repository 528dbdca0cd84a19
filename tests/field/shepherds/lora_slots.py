"""LoRA adapter slots on the device.

A base model has a fixed number of adapter slots. An adapter is loaded into a slot on first use, shared by all
requests that name it (reference counted), and evicted in LRU order once nobody refers to it.
"""
from __future__ import annotations

import collections
import enum
import logging
import threading
import time
import typing as t

logger = logging.getLogger("lora")

AdapterId = str

class AdapterMissing(KeyError):
    """The adapter is not in the repository."""

class RankTooLarge(ValueError):
    """The adapter does not fit a slot."""

class SlotState(enum.Enum):
    EMPTY = 0
    LOADING = 1
    READY = 2

class Slot:
    def __init__(self, index: int, max_rank: int):
        self.index = index
        self.max_rank = max_rank
        self.state = SlotState.EMPTY
        self.adapter: t.Optional[AdapterId] = None
        self.users = 0
        self.loaded_at = 0.0

class SlotArray:
    """Hands out empty slots. Knows nothing of adapters."""

    def __init__(self, n: int, max_rank: int):
        self._empty = collections.deque(Slot(i, max_rank) for i in range(n))
        self._lock = threading.Lock()

    def claim(self) -> t.Optional[Slot]:
        with self._lock:
            if not self._empty:
                return None
            return self._empty.popleft()  # clean: returned to the caller

    def surrender(self, slot: Slot) -> None:
        slot.state = SlotState.EMPTY
        slot.adapter = None
        with self._lock:
            self._empty.append(slot)

class AdapterCache:
    """Maps adapters to slots. checkout() and checkin() come in pairs."""

    def __init__(self, slots: SlotArray, repo):
        self._slots = slots
        self._repo = repo
        self._resident: "collections.OrderedDict[AdapterId, Slot]" = collections.OrderedDict()
        self._lock = threading.RLock()
        self.hits = self.misses = self.evictions = 0

    def _evict_one(self) -> bool:
        for name, slot in self._resident.items():
            if slot.users == 0:
                del self._resident[name]
                self._slots.surrender(slot)
                self.evictions += 1
                return True
        return False

    def _slot_for_load(self) -> t.Optional[Slot]:
        slot = self._slots.claim()  # clean: None is what gets dropped here
        if slot is None and self._evict_one():
            slot = self._slots.claim()  # clean: returned to the caller
        return slot

    def _load(self, name: AdapterId) -> t.Optional[Slot]:
        slot = self._slot_for_load()  # leak: RankTooLarge is raised with the slot claimed
        if slot is None:
            return None
        slot.state = SlotState.LOADING
        weights = self._repo.get(name)
        if weights is None:
            self._slots.surrender(slot)
            raise AdapterMissing(name)
        if weights.rank > slot.max_rank:
            raise RankTooLarge(f"{name}: rank {weights.rank} > {slot.max_rank}")
        weights.copy_into(slot.index)
        slot.state = SlotState.READY
        slot.adapter = name
        slot.loaded_at = time.time()
        return slot

    def checkout(self, name: AdapterId) -> t.Optional[Slot]:
        """One reference to the adapter's slot, None when all slots are in use."""
        with self._lock:
            slot = self._resident.get(name)
            if slot is None:
                self.misses += 1
                slot = self._load(name)  # clean: near miss, it enters the resident map and eviction surrenders it
                if slot is None:
                    return None
                self._resident[name] = slot
            else:
                self.hits += 1
                self._resident.move_to_end(name)
            slot.users += 1
            return slot

    def checkin(self, slot: Slot) -> None:
        with self._lock:
            slot.users -= 1
            if slot.users < 0:
                raise RuntimeError(f"slot {slot.index} checked in too often")

class LoraRequest:
    def __init__(self, rid: str, adapter: t.Optional[AdapterId], prompt: t.List[int]):
        self.rid = rid
        self.adapter = adapter
        self.prompt = prompt
        self.slot: t.Optional[Slot] = None
        self.cancelled = False
        self.done = threading.Event()

class LoraScheduler:
    """Builds batches in which at most `max_distinct` adapters occur."""

    def __init__(self, cache: AdapterCache, max_distinct: int = 8):
        self.cache = cache
        self.max_distinct = max_distinct
        self.queue: t.Deque[LoraRequest] = collections.deque()
        self.active: t.Dict[str, LoraRequest] = {}
        self.preloaded: t.List[Slot] = []

    def submit(self, req: LoraRequest) -> None:
        self.queue.append(req)

    def fill(self, budget: int) -> t.List[LoraRequest]:
        picked: t.List[LoraRequest] = []
        held_back: t.List[LoraRequest] = []
        distinct = {r.adapter for r in self.active.values()}
        while self.queue and len(picked) < budget:
            req = self.queue.popleft()
            if req.adapter is None:
                picked.append(req)
                self.active[req.rid] = req
                continue
            if req.adapter not in distinct and len(distinct) >= self.max_distinct:
                held_back.append(req)
                continue
            try:
                req.slot = self.cache.checkout(req.adapter)  # leak: cancel() takes the request out of active and forgets its slot
            except (AdapterMissing, RankTooLarge) as exc:
                logger.info("%s rejected: %s", req.rid, exc)
                req.done.set()
                continue
            if req.slot is None:
                held_back.append(req)
                break
            distinct.add(req.adapter)
            picked.append(req)
            self.active[req.rid] = req
        self.queue.extendleft(reversed(held_back))
        return picked

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        if req.slot is not None:
            self.cache.checkin(req.slot)
            req.slot = None
        req.done.set()

    def cancel(self, rid: str) -> bool:
        req = self.active.pop(rid, None)
        if req is None:
            return False
        req.cancelled = True
        req.done.set()
        return True

    def preload(self, names: t.Iterable[AdapterId]) -> int:
        """Keep popular adapters resident by holding a reference to each."""
        for name in names:
            try:
                slot = self.cache.checkout(name)  # clean: kept in the list, unpreload() checks all of it in
            except AdapterMissing:
                logger.warning("no adapter %s to preload", name)
                continue
            if slot is None:
                break
            self.preloaded.append(slot)
        return len(self.preloaded)

    def unpreload(self) -> None:
        while self.preloaded:
            self.cache.checkin(self.preloaded.pop())

def run_once(cache: AdapterCache, engine, req: LoraRequest) -> t.Optional[t.List[int]]:
    slot = cache.checkout(req.adapter) if req.adapter else None  # clean: near miss, checked in under the same condition
    if req.adapter and slot is None:
        return None
    try:
        return engine.generate(req.prompt, slot.index if slot else -1)
    finally:
        if slot is not None:
            cache.checkin(slot)

def compare_adapters(cache: AdapterCache, engine, names, prompt):
    """The same prompt through several adapters at once; all of them must be resident."""
    slots = []
    for name in names:
        slot = cache.checkout(name)  # leak: the return for a full device leaves the earlier ones checked out
        if slot is None:
            logger.info("no slot for %s", name)
            return {}
        slots.append(slot)
    try:
        rows = engine.generate_many(prompt, [s.index for s in slots])
    finally:
        for slot in slots:
            cache.checkin(slot)
    return dict(zip(names, rows))

def best_adapter(cache, engine, names, prompt, good_enough):
    """First adapter whose score reaches `good_enough`, the best one otherwise."""
    best, best_score = None, float("-inf")
    for name in names:
        slot = cache.checkout(name)  # leak: a score that is good enough returns before checkin
        if slot is None:
            continue
        score = engine.score(prompt, slot.index)
        if score >= good_enough:
            return name
        if score > best_score:
            best, best_score = name, score
        cache.checkin(slot)
    return best

def bench(cache, engine, name, rounds):
    """Tokens per second through one adapter, cold and warm."""
    rates = []
    slot = cache.checkout(name)  # leak: rebound in the loop while the first reference is held
    for i in range(rounds):
        t0 = time.perf_counter()
        slot = cache.checkout(name)  # clean: checked in at the end of each round
        if slot is None:
            break
        n = len(engine.generate([1] * 128, slot.index))
        rates.append(n / (time.perf_counter() - t0))
        cache.checkin(slot)
    return rates
