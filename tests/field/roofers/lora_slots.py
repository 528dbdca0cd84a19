"""Adapter slots for multi-LoRA serving."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any, Callable, Optional

log = logging.getLogger(__name__)


@dataclass
class Slot:
    index: int
    adapter: str = ""
    rank: int = 0


class SlotTable:
    """Fixed set of adapter slots in the stacked weight tensors."""

    def __init__(self, n: int) -> None:
        self._free = [Slot(i) for i in range(n)]
        self._mu = threading.Lock()

    def claim(self, adapter: str, rank: int) -> Optional[Slot]:
        with self._mu:
            if not self._free:
                return None
            slot = self._free.pop()
        slot.adapter, slot.rank = adapter, rank
        return slot

    def relinquish(self, slot: Slot) -> None:
        slot.adapter, slot.rank = "", 0
        with self._mu:
            self._free.append(slot)

    def claim_wide(self, adapter: str, rank: int, max_rank: int) -> Optional[tuple[Slot, Slot]]:
        """Two neighbouring claims for adapters over max_rank."""
        lo = self.claim(adapter, max_rank)  # clean: returned, or relinquished when the second half is missing
        if lo is None:
            return None
        hi = self.claim(adapter, rank - max_rank)  # clean: returned
        if hi is None:
            self.relinquish(lo)
            return None
        return lo, hi

    def free_count(self) -> int:
        return len(self._free)


class AdapterManager:
    def __init__(self, table: SlotTable, fetch: Callable[[str], Any], upload: Callable[[Any, Slot], bool], max_loras: int) -> None:
        self.table = table
        self.fetch = fetch
        self.upload = upload
        self.max_loras = max_loras
        self.active: dict[str, Slot] = {}
        self.wide: dict[str, tuple[Slot, Slot]] = {}

    def load(self, name: str, rank: int) -> bool:
        if name in self.active:
            return True
        slot = self.table.claim(name, rank)  # leak: a refused upload returns with the slot
        if slot is None:
            return False
        if not self.upload(self.fetch(name), slot):
            log.warning("upload of %s refused", name)
            return False
        self.active[name] = slot
        return True

    def load_checked(self, name: str, rank: int) -> bool:
        if name in self.active:
            return True
        slot = self.table.claim(name, rank)  # clean: near miss, ok decides who keeps it
        ok = False
        try:
            ok = slot is not None and self.upload(self.fetch(name), slot)
        except KeyError:
            log.warning("no adapter %s", name)
        finally:
            if not ok and slot is not None:
                self.table.relinquish(slot)
        if ok:
            self.active[name] = slot
        return ok

    def load_wide(self, name: str, rank: int, max_rank: int) -> bool:
        pair = self.table.claim_wide(name, rank, max_rank)  # leak: loading a wide adapter again overwrites its pair
        if pair is None:
            return False
        weights = self.fetch(name)
        for half in pair:
            self.upload(weights, half)
        self.wide[name] = pair
        return True

    def unload(self, name: str) -> None:
        slot = self.active.pop(name, None)
        if slot is not None:
            self.table.relinquish(slot)
        for half in self.wide.pop(name, ()):
            self.table.relinquish(half)

    def rename(self, old: str, new: str) -> bool:
        """The slot moves under its new name; one that is in the way goes."""
        slot = self.active.pop(old, None)
        if slot is None:
            return False
        if new in self.active:
            self.table.relinquish(self.active.pop(new))
        slot.adapter = new
        self.active[new] = slot
        return True


class BatchAdapters:
    """The slots one batch computes with, from prepare to finish."""

    def __init__(self, table: SlotTable, merged: bool, shadow: bool = False) -> None:
        self.table = table
        self.merged = merged
        self.shadow = shadow
        self.slot: Optional[Slot] = None
        self.shadow_slot: Optional[Slot] = None
        self.extra: Optional[Slot] = None

    def prepare(self, name: str, rank: int) -> bool:
        if not self.merged:
            self.slot = self.table.claim(name, rank)  # clean: near miss, finish tests the same flag
            if self.slot is None:
                return False
        if self.shadow:
            self.shadow_slot = self.table.claim(name + "@shadow", rank)  # leak: finish returns before it for merged batches
        if rank > 64:
            self.extra = self.table.claim(name + "@hi", rank - 64)  # clean: near miss, finish goes by None
        return True

    def finish(self) -> None:
        if self.extra is not None:
            self.table.relinquish(self.extra)
            self.extra = None
        if self.merged:
            return
        if self.slot is not None:
            self.table.relinquish(self.slot)
            self.slot = None
        if self.shadow_slot is not None:
            self.table.relinquish(self.shadow_slot)
            self.shadow_slot = None


def run_batch(table: SlotTable, name: str, rank: int, merged: bool, shadow: bool, run: Callable[[], Any]) -> Any:
    batch = BatchAdapters(table, merged, shadow)
    if not batch.prepare(name, rank):
        return None
    try:
        return run()
    finally:
        batch.finish()


def with_adapter(table: SlotTable, name: Optional[str], rank: int, run: Callable[[Optional[Slot]], Any]) -> Any:
    slot = None
    if name is not None:
        slot = table.claim(name, rank)  # clean: near miss, relinquished under the same test of name
        if slot is None:
            raise RuntimeError(f"no slot for {name}")
    out = run(slot)
    if name is not None:
        table.relinquish(slot)
    return out


def with_adapter_or_base(table: SlotTable, name: Optional[str], rank: int, run: Callable[[Optional[Slot]], Any]) -> Any:
    slot = table.claim(name, rank) if name else None  # leak: the fall-back to the base model returns with the slot
    out = run(slot)
    if out is None:
        log.info("adapter %s gave nothing, using the base model", name)
        return run(None)
    if slot is not None:
        table.relinquish(slot)
    return out


def benchmark_ranks(table: SlotTable, ranks: list[int], run: Callable[[Slot], float]) -> dict[int, float]:
    times: dict[int, float] = {}
    slot: Optional[Slot] = None
    for r in ranks:
        if slot is None:
            slot = table.claim("bench", r)  # clean: near miss, one slot for all rounds, relinquished at the end
            if slot is None:
                break
        slot.rank = r
        times[r] = run(slot)
    if slot is not None:
        table.relinquish(slot)
    return times
