"""Multi-LoRA serving: adapters occupy device slots, requests pin the adapter they use."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Iterator, Optional


class NoSlot(RuntimeError):
    pass


class SlotMap:
    """A bitmap of device slots: bit i set means slot i is taken."""

    def __init__(self, width: int):
        self.width = width
        self.bits = 0

    def mark(self) -> Optional[int]:
        for i in range(self.width):
            if not self.bits >> i & 1:
                self.bits |= 1 << i
                return i
        return None

    def unmark(self, i: int) -> None:
        self.bits &= ~(1 << i)

    def mark_run(self, n: int) -> Optional[range]:
        """`n` neighbouring slots, for adapters of a high rank."""
        mask = (1 << n) - 1
        for i in range(self.width - n + 1):
            if not self.bits & (mask << i):
                self.bits |= mask << i
                return range(i, i + n)
        return None

    def unmark_run(self, run: range) -> None:
        for i in run:
            self.unmark(i)


@dataclass
class Adapter:
    name: str
    rank: int
    slot: Optional[int] = None
    wide: Optional[range] = None
    pins: int = 0
    weights: Any = None


@dataclass
class Request:
    rid: str
    adapter: Optional[str]
    adapter_ref: Optional[Adapter] = None
    done: bool = False
    tokens: list[int] = field(default_factory=list)


class AdapterManager:
    def __init__(self, slots: SlotMap, store, wide_rank: int = 64):
        self.slots = slots
        self.store = store
        self.wide_rank = wide_rank
        self.loaded: dict[str, Adapter] = {}
        self.mu = threading.RLock()

    # loading

    def _evict_one(self) -> bool:
        for name, ad in self.loaded.items():
            if ad.pins == 0:
                del self.loaded[name]
                self._vacate(ad)
                return True
        return False

    def _vacate(self, ad: Adapter) -> None:
        if ad.rank >= self.wide_rank:
            self.slots.unmark_run(ad.wide)
        else:
            self.slots.unmark(ad.slot)
        ad.slot = ad.wide = None

    def load(self, name: str) -> Adapter:
        with self.mu:
            if name in self.loaded:
                return self.loaded[name]
            meta = self.store.describe(name)
            ad = Adapter(name, meta["rank"])
            if ad.rank >= self.wide_rank:
                ad.wide = self.slots.mark_run(meta["rank"] // 16)  # clean: near miss, _vacate() tests the same rank
                if ad.wide is None:
                    raise NoSlot(name)
            else:
                ad.slot = self.slots.mark()  # clean: kept in the adapter that _vacate() empties
                if ad.slot is None:
                    raise NoSlot(name)
            self.loaded[name] = ad
            return ad

    def load_evicting(self, name: str) -> Adapter:
        while True:
            try:
                return self.load(name)
            except NoSlot:
                if not self._evict_one():
                    raise

    def preload(self, names: list[str]) -> int:
        count = 0
        for name in names:
            if name in self.loaded:
                continue
            slot = self.slots.mark()  # leak: an adapter the store does not know is skipped with its slot marked
            if slot is None:
                break
            weights = self.store.fetch(name)
            if weights is None or weights.rank >= self.wide_rank:
                continue
            self.loaded[name] = Adapter(name, weights.rank, slot=slot, weights=weights)
            count += 1
        return count

    def reload(self, name: str) -> bool:
        """Pull a new version into a second slot, then switch over."""
        with self.mu:
            old = self.loaded.get(name)
            if old is None or old.rank >= self.wide_rank:
                return False
            slot = self.slots.mark()  # clean: near miss, unmarked on refusal and else the adapter's, whose old slot is unmarked
            if slot is None:
                return False
            weights = self.store.fetch(name)
            if weights is None or weights.rank != old.rank:
                self.slots.unmark(slot)
                return False
            previous, old.slot = old.slot, slot
            old.weights = weights
            self.slots.unmark(previous)
            return True

    def merge(self, a: str, b: str) -> Optional[Adapter]:
        """Weighted sum of two loaded adapters in a slot of its own."""
        if f"{a}+{b}" in self.loaded:
            return self.loaded[f"{a}+{b}"]
        slot = self.slots.mark()  # leak: stays marked when the ranks differ
        if slot is None:
            return None
        left, right = self.loaded[a], self.loaded[b]
        if left.rank != right.rank or left.rank >= self.wide_rank:
            return None
        merged = Adapter(f"{a}+{b}", left.rank, slot=slot, weights=left.weights + right.weights)
        self.loaded[merged.name] = merged
        return merged

    def resize(self, name: str, rank: int) -> bool:
        ad = self.loaded[name]
        if ad.pins or ad.rank < self.wide_rank or rank < self.wide_rank:
            return False
        run = self.slots.mark_run(rank // 16)  # leak: the new run stays marked when the store has no such rank
        if run is None:
            return False
        if rank not in self.store.describe(name)["ranks"]:
            return False
        self.slots.unmark_run(ad.wide)
        ad.wide = run
        ad.rank = rank
        return True

    # pins

    def pin(self, name: str) -> Optional[Adapter]:
        with self.mu:
            ad = self.loaded.get(name)
            if ad is None:
                return None
            ad.pins += 1
            return ad

    def unpin(self, ad: Adapter) -> None:
        with self.mu:
            ad.pins -= 1

    def pinned(self, names: list[str]) -> Iterator[Adapter]:
        for name in names:
            ad = self.pin(name)  # clean: near miss, the generator's finally unpins it even when the consumer stops
            if ad is None:
                continue
            try:
                yield ad
            finally:
                self.unpin(ad)


class Scheduler:
    def __init__(self, adapters: AdapterManager, max_running: int):
        self.adapters = adapters
        self.max_running = max_running
        self.running: dict[str, Request] = {}
        self.queue: list[Request] = []

    def _start(self, req: Request) -> bool:
        if req.adapter is not None:
            req.adapter_ref = self.adapters.pin(req.adapter)  # clean: near miss, finish() unpins under the same test of the adapter name
            if req.adapter_ref is None:
                return False
        self.running[req.rid] = req
        return True

    def admit(self) -> int:
        started = 0
        while self.queue and len(self.running) < self.max_running:
            if not self._start(self.queue[0]):
                break
            self.queue.pop(0)
            started += 1
        return started

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid)
        req.done = True
        if req.adapter is not None:
            self.adapters.unpin(req.adapter_ref)
            req.adapter_ref = None

    def admit_chat(self, req: Request, history: list[int]) -> bool:
        ref = self.adapters.pin(req.adapter)  # leak: still pinned when the context is over the limit
        if ref is None:
            return False
        if len(history) > ref.weights.max_len:
            req.done = True
            return False
        req.adapter_ref = ref
        req.tokens = list(history)
        self.running[req.rid] = req
        return True

    def retarget(self, rid: str, name: str) -> bool:
        """Continue a running request on another adapter."""
        req = self.running[rid]
        nxt = self.adapters.pin(name)  # leak: finish() skips requests whose adapter name is None, and such requests pass here
        if nxt is None:
            return False
        if req.adapter_ref is not None:
            self.adapters.unpin(req.adapter_ref)
        req.adapter_ref = nxt
        return True

    def score(self, name: str, batch: list[list[int]]) -> Optional[list[float]]:
        ad = self.adapters.pin(name)  # clean: unpinned in finally
        if ad is None:
            return None
        try:
            return [ad.weights.score(row) for row in batch]
        finally:
            self.adapters.unpin(ad)

    def best_of(self, names: list[str], batch: list[int]) -> tuple[Optional[str], float]:
        best: Optional[Adapter] = None
        best_score = float("-inf")
        for name in names:
            ad = self.adapters.pin(name)  # clean: near miss, the loser of each comparison is unpinned and the winner after the loop
            if ad is None:
                continue
            score = ad.weights.score(batch)
            if score > best_score:
                ad, best, best_score = best, ad, score
            if ad is not None:
                self.adapters.unpin(ad)
        if best is None:
            return None, best_score
        self.adapters.unpin(best)
        return best.name, best_score
