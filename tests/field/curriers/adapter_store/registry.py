"""Adapters by id, with a count of the requests that use each."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional

from .slots import AdapterSlots

log = logging.getLogger(__name__)


@dataclass
class Adapter:
    adapter_id: str
    rank: int
    slot: int
    refs: int = 0


class AdapterRegistry:
    """`incref` before an adapter is put into a batch, `decref` when it leaves."""

    def __init__(self, slots: AdapterSlots, max_rank: int) -> None:
        self.slots = slots
        self.max_rank = max_rank
        self.adapters: Dict[str, Adapter] = {}

    def incref(self, adapter_id: str) -> Optional[Adapter]:
        adapter = self.adapters.get(adapter_id)
        if adapter is not None:
            adapter.refs += 1
        return adapter

    def decref(self, adapter: Adapter) -> None:
        adapter.refs -= 1
        assert adapter.refs >= 0

    def add(self, adapter_id: str, rank: int) -> bool:
        slot = self.slots.try_reserve(adapter_id)  # leak: an adapter above the maximal rank is refused with its slot still reserved
        if slot is None:
            return False
        if rank > self.max_rank:
            log.error("adapter %s has rank %d", adapter_id, rank)
            return False
        self.adapters[adapter_id] = Adapter(adapter_id, rank, slot)
        return True

    def add_checked(self, adapter_id: str, rank: int) -> bool:
        if adapter_id in self.adapters or rank > self.max_rank:
            return False
        slot = self.slots.try_reserve(adapter_id)  # clean: near miss, all refusals come before it; owned by the adapter
        if slot is None:
            return False
        self.adapters[adapter_id] = Adapter(adapter_id, rank, slot)
        return True

    def remove(self, adapter_id: str) -> bool:
        adapter = self.adapters.get(adapter_id)
        if adapter is None or adapter.refs:
            return False
        del self.adapters[adapter_id]
        self.slots.unreserve(adapter.slot)
        return True

    def evict_idle(self) -> Optional[str]:
        for adapter_id, adapter in self.adapters.items():
            if adapter.refs == 0:
                self.remove(adapter_id)
                return adapter_id
        return None


class BatchBuilder:
    def __init__(self, registry: AdapterRegistry, max_adapters: int) -> None:
        self.registry = registry
        self.max_adapters = max_adapters

    def build(self, ids: Iterable[str]) -> List[Adapter]:
        batch: List[Adapter] = []
        for adapter_id in ids:
            adapter = self.registry.incref(adapter_id)  # leak: the one that overflows the batch is dropped by the break with its count up
            if adapter is None:
                continue
            if len(batch) == self.max_adapters:
                break
            batch.append(adapter)
        return batch

    def build_unique(self, ids: Iterable[str]) -> Dict[str, Adapter]:
        batch: Dict[str, Adapter] = {}
        for adapter_id in ids:
            if adapter_id in batch:
                continue
            adapter = self.registry.incref(adapter_id)  # clean: near miss, duplicates are skipped before it
            if adapter is not None:
                batch[adapter_id] = adapter
        return batch

    def release(self, batch: Iterable[Adapter]) -> None:
        for adapter in batch:
            self.registry.decref(adapter)

    def run(self, ids: Iterable[str], step) -> int:
        batch = self.build_unique(ids)  # clean: released in the finally
        try:
            return step(list(batch.values()))
        finally:
            self.release(batch.values())

    def ranks(self, ids: Iterable[str]) -> List[int]:
        batch = self.build(ids)  # leak: only the ranks are read; the counts stay up
        return [adapter.rank for adapter in batch]
