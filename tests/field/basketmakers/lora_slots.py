"""LoRA adapters resident on the GPU: slot table, LRU and per-batch pins."""
from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Optional

log = logging.getLogger("lora")


class NoSlot(Exception):
    pass


class AdapterSlots:
    """A bitmap of slots. `occupy` gives -1 if it is full."""

    def __init__(self, n: int):
        self.n = n
        self.bits = 0

    def occupy(self) -> int:
        for i in range(self.n):
            if not self.bits >> i & 1:
                self.bits |= 1 << i
                return i
        return -1

    def vacate(self, i: int) -> None:
        self.bits &= ~(1 << i)

    def occupy_run(self, n: int) -> list[int]:
        """n slots or none at all."""
        got: list[int] = []
        for _ in range(n):
            i = self.occupy()  # clean: near miss, -1 vacates those already in got
            if i < 0:
                for j in got:
                    self.vacate(j)
                return []
            got.append(i)
        return got


class Resident:
    def __init__(self, adapter_id: str, slot: int, rank: int):
        self.adapter_id = adapter_id
        self.slot = slot
        self.rank = rank
        self.pins = 0

    def pin(self) -> "Resident":
        self.pins += 1
        return self

    def unpin(self) -> None:
        self.pins -= 1


class LoraManager:
    def __init__(self, slots: AdapterSlots, loader, max_rank: int = 64):
        self.slots = slots
        self.loader = loader
        self.max_rank = max_rank
        self.lru: "OrderedDict[str, Resident]" = OrderedDict()
        self.batch: list[Resident] = []

    def _evict(self) -> bool:
        for key, res in self.lru.items():
            if res.pins == 0:
                del self.lru[key]
                self.slots.vacate(res.slot)
                return True
        return False

    def _slot(self) -> int:
        slot = self.slots.occupy()  # clean: returned to the caller
        if slot < 0 and self._evict():
            slot = self.slots.occupy()  # clean: near miss, rebinds slot only when it was -1
        return slot

    def load(self, adapter_id: str) -> Resident:
        if adapter_id in self.lru:
            self.lru.move_to_end(adapter_id)
            return self.lru[adapter_id]
        slot = self._slot()  # leak: a rank above max_rank raises with the slot occupied
        if slot < 0:
            raise NoSlot(adapter_id)
        meta = self.loader.describe(adapter_id)
        if meta["rank"] > self.max_rank:
            raise ValueError(f"{adapter_id}: rank {meta['rank']} > {self.max_rank}")
        self.loader.copy_to(adapter_id, slot)
        res = Resident(adapter_id, slot, meta["rank"])
        self.lru[adapter_id] = res
        return res

    def preload(self, ids: list[str]) -> int:
        n = 0
        for adapter_id in ids:
            if adapter_id in self.lru:
                continue
            slot = self._slot()  # clean: vacated if the copy fails, else moved into the lru
            if slot < 0:
                break
            try:
                self.loader.copy_to(adapter_id, slot)
            except OSError:
                self.slots.vacate(slot)
                continue
            self.lru[adapter_id] = Resident(adapter_id, slot, 0)
            n += 1
        return n

    def preload_listed(self, ids: list[str], allow: set[str]) -> list[str]:
        loaded = []
        for adapter_id in ids:
            if adapter_id in self.lru:
                continue
            slot = self._slot()  # leak: adapters not in allow go on to the next turn with the slot held
            if slot < 0:
                break
            if adapter_id not in allow:
                log.info("skip %s", adapter_id)
                continue
            self.loader.copy_to(adapter_id, slot)
            self.lru[adapter_id] = Resident(adapter_id, slot, 0)
            loaded.append(adapter_id)
        return loaded

    def begin_batch(self, ids: set[str]) -> None:
        for adapter_id in ids:
            if adapter_id in self.lru:
                self.batch.append(self.lru[adapter_id].pin())  # clean: near miss, end_batch() unpins all in batch

    def end_batch(self) -> None:
        for res in self.batch:
            res.unpin()
        self.batch.clear()

    def run_with(self, adapter_id: str, fn):
        res = self.lru[adapter_id].pin()  # clean: unpinned in finally
        try:
            return fn(res.slot)
        finally:
            res.unpin()

    def swap(self, old_id: str, new_id: str) -> bool:
        old = self.lru[old_id].pin()  # leak: the early return for a resident new_id leaves the pin
        if new_id in self.lru:
            return True
        self.loader.copy_to(new_id, old.slot)
        old.unpin()
        del self.lru[old_id]
        self.lru[new_id] = Resident(new_id, old.slot, old.rank)
        return True

    def load_pair(self, a: str, b: str) -> tuple[int, int]:
        sa = self.slots.occupy()  # leak: NoSlot for b leaves the slot of a occupied
        if sa < 0:
            raise NoSlot(a)
        sb = self.slots.occupy()  # clean: moved into the lru with sa
        if sb < 0:
            raise NoSlot(b)
        for key, slot in ((a, sa), (b, sb)):
            self.loader.copy_to(key, slot)
            self.lru[key] = Resident(key, slot, 0)
        return sa, sb

    def load_fused(self, ids: list[str]) -> bool:
        run = self.slots.occupy_run(len(ids))  # clean: each slot of the run moves into the lru
        if not run:
            return False
        for key, slot in zip(ids, run):
            self.loader.copy_to(key, slot)
            self.lru[key] = Resident(key, slot, 0)
        return True

    def benchmark(self, ids: list[str], steps: int) -> float:
        run = self.slots.occupy_run(len(ids))  # leak: only the first slot of the run is vacated
        if not run:
            return 0.0
        total = sum(self.loader.time_copy(i, s) for i, s in zip(ids, run) for _ in range(steps))
        self.slots.vacate(run[0])
        return total

    async def load_async(self, adapter_id: str, timeout: float) -> Optional[Resident]:
        slot = self._slot()  # leak: the timeout returns None and nobody has the slot
        if slot < 0:
            return None
        try:
            await asyncio.wait_for(self.loader.copy_async(adapter_id, slot), timeout)
        except asyncio.TimeoutError:
            log.warning("adapter %s timed out", adapter_id)
            return None
        res = self.lru[adapter_id] = Resident(adapter_id, slot, 0)
        return res
