"""LoRA adapter residency: host copies are pinned by count, device slots are reserved per adapter."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Set

logger = logging.getLogger(__name__)


@dataclass
class HostAdapter:
    adapter_id: str
    rank: int
    version: int = 0
    pins: int = 0


class AdapterStore:
    def __init__(self) -> None:
        self._adapters: Dict[str, HostAdapter] = {}

    def add(self, adapter_id: str, rank: int) -> None:
        self._adapters[adapter_id] = HostAdapter(adapter_id, rank)

    def pin(self, adapter_id: str) -> Optional[HostAdapter]:
        adapter = self._adapters.get(adapter_id)
        if adapter is not None:
            adapter.pins += 1
        return adapter

    def unpin(self, adapter: HostAdapter) -> None:
        adapter.pins -= 1


class SlotTable:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self.owner: Dict[int, str] = {}

    def reserve(self, adapter_id: str) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()
        self.owner[slot] = adapter_id
        return slot

    def unreserve(self, slot: int) -> None:
        self.owner.pop(slot, None)
        self._free.append(slot)


class WeightCopier:
    async def copy(self, host: HostAdapter, slot: int) -> None:
        await asyncio.sleep(0)
        if host.rank > 64:
            raise ValueError(f"rank {host.rank} does not fit slot {slot}")


class LoraManager:
    def __init__(self, store: AdapterStore, slots: SlotTable, max_rank: int = 64) -> None:
        self.store = store
        self.slots = slots
        self.copier = WeightCopier()
        self.max_rank = max_rank
        self.active: Dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._loads: Set[asyncio.Task] = set()

    async def activate(self, adapter_id: str) -> bool:
        async with self._lock:
            if adapter_id in self.active:
                return True
            host = self.store.pin(adapter_id)  # clean: near miss, unpinned in finally on every way out
            if host is None:
                return False
            try:
                slot = self.slots.reserve(adapter_id)  # leak: the handled copy failure returns without unreserving
                if slot is None:
                    return False
                try:
                    await self.copier.copy(host, slot)
                except ValueError as exc:
                    logger.warning("adapter %s rejected: %s", adapter_id, exc)
                    return False
                self.active[adapter_id] = slot
                return True
            finally:
                self.store.unpin(host)

    async def activate_checked(self, adapter_id: str) -> bool:
        async with self._lock:
            if adapter_id in self.active:
                return True
            host = self.store.pin(adapter_id)  # leak: an adapter over max_rank returns with the pin
            if host is None or host.rank > self.max_rank:
                return False
            slot = self.slots.reserve(adapter_id)  # clean: unreserved on failure, else recorded in active
            if slot is None:
                self.store.unpin(host)
                return False
            try:
                await self.copier.copy(host, slot)
            except ValueError:
                self.slots.unreserve(slot)
                return False
            else:
                self.active[adapter_id] = slot
                return True
            finally:
                self.store.unpin(host)

    async def activate_pair(self, target: str, draft: str) -> bool:
        async with self._lock:
            first = self.slots.reserve(target)  # leak: stays reserved when the draft gets no slot
            if first is None:
                return False
            second = self.slots.reserve(draft)  # clean: recorded in active
            if second is None:
                return False
            self.deactivate(target)
            self.deactivate(draft)
            self.active[target] = first
            self.active[draft] = second
            return True

    async def activate_all(self, adapter_ids: Sequence[str]) -> bool:
        async with self._lock:
            taken: Dict[str, int] = {}
            for adapter_id in dict.fromkeys(adapter_ids):
                if adapter_id in self.active:
                    continue
                slot = self.slots.reserve(adapter_id)  # clean: near miss, for-else keeps all or the rollback returns all
                if slot is None:
                    break
                taken[adapter_id] = slot
            else:
                self.active.update(taken)
                return True
            for slot in taken.values():
                self.slots.unreserve(slot)
            return False

    def deactivate(self, adapter_id: str) -> None:
        slot = self.active.pop(adapter_id, None)
        if slot is not None:
            self.slots.unreserve(slot)

    async def replace(self, old: str, new: str) -> bool:
        """Hand the slot of one adapter to another without a round through the free list."""
        async with self._lock:
            slot = self.active.pop(old, None)
            if slot is None:
                slot = self.slots.reserve(new)  # clean: near miss, either slot ends in active
                if slot is None:
                    return False
            self.deactivate(new)
            self.slots.owner[slot] = new
            self.active[new] = slot
            return True

    async def prefetch(self, adapter_ids: Sequence[str]) -> int:
        staged = 0
        for adapter_id in adapter_ids:
            host = self.store.pin(adapter_id)  # leak: an adapter that is already active continues past the unpin
            if host is None:
                continue
            if adapter_id in self.active:
                continue
            await asyncio.sleep(0)
            staged += host.rank
            self.store.unpin(host)
        return staged

    def start_refresh(self, adapter_id: str) -> Optional[asyncio.Task]:
        host = self.store.pin(adapter_id)  # clean: near miss, the task unpins it in finally
        if host is None:
            return None
        task = asyncio.get_running_loop().create_task(self._refresh(host))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return task

    async def _refresh(self, host: HostAdapter) -> None:
        try:
            slot = self.active.get(host.adapter_id)
            if slot is None:
                return
            await self.copier.copy(host, slot)
            host.version += 1
        finally:
            self.store.unpin(host)

    def start_upgrade(self, adapter_id: str, version: int) -> Optional[asyncio.Task]:
        host = self.store.pin(adapter_id)  # leak: the task returns early at an old version and does not unpin
        if host is None:
            return None
        task = asyncio.get_running_loop().create_task(self._upgrade(host, version))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return task

    async def _upgrade(self, host: HostAdapter, version: int) -> None:
        if version <= host.version:
            return
        await asyncio.sleep(0)
        host.version = version
        self.store.unpin(host)


async def run_batch(manager: LoraManager, adapter_ids: Sequence[str]) -> List[int]:
    hosts: List[HostAdapter] = []
    try:
        for adapter_id in adapter_ids:
            host = manager.store.pin(adapter_id)  # clean: near miss, the early return unpins what is in the list
            if host is None:
                return []
            hosts.append(host)
        return [h.rank for h in hosts]
    finally:
        for host in hosts:
            manager.store.unpin(host)


async def _main() -> None:
    store = AdapterStore()
    for i in range(3):
        store.add(f"a{i}", 8)
    mgr = LoraManager(store, SlotTable(2))
    assert await mgr.activate("a0")
    assert await mgr.replace("a0", "a1")
    assert not await mgr.activate_all(["a0", "a2"])
    task = mgr.start_refresh("a1")
    assert task is not None
    await task
    mgr.deactivate("a1")
    assert await run_batch(mgr, ["a0", "a1"]) == [8, 8]


if __name__ == "__main__":
    asyncio.run(_main())
