"""LoRA adapters on the device: slots, active counts, asynchronous loading."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Awaitable, Callable

import torch

log = logging.getLogger("lora")

Fetch = Callable[[str], Awaitable[dict[str, torch.Tensor]]]


@dataclass
class Adapter:
    name: str
    slot: int
    rank: int
    active: int = 0
    loaded_at: float = field(default_factory=time.monotonic)


class AdapterSlots:
    """A semaphore bounds the slots; assign() waits for one, unassign() frees it."""

    def __init__(self, count: int, max_rank: int, hidden: int):
        self.a = torch.zeros(count, max_rank, hidden, device="cuda")
        self.b = torch.zeros(count, hidden, max_rank, device="cuda")
        self._idle = list(range(count))
        self._sem = asyncio.Semaphore(count)

    async def assign(self) -> int:
        await self._sem.acquire()  # clean: near miss, released in unassign
        return self._idle.pop()

    def unassign(self, slot: int) -> None:
        self._idle.append(slot)
        self._sem.release()

    def write(self, slot: int, weights: dict[str, torch.Tensor]) -> int:
        rank = weights["a"].shape[0]
        self.a[slot, :rank].copy_(weights["a"])
        self.b[slot, :, :rank].copy_(weights["b"])
        return rank


class AdapterManager:
    def __init__(self, slots: AdapterSlots, fetch: Fetch, keep: int):
        self.slots, self.fetch, self.keep = slots, fetch, keep
        self.loaded: OrderedDict[str, Adapter] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def activate(self, name: str) -> Adapter | None:
        """Loaded and counted as active; deactivate() counts down."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        await lock.acquire()  # clean: released in the finally
        try:
            adapter = self.loaded.get(name)
            if adapter is None:
                adapter = await self._load(name)
                if adapter is None:
                    return None
            adapter.active += 1
            self.loaded.move_to_end(name)
            return adapter
        finally:
            lock.release()

    async def _load(self, name: str) -> Adapter | None:
        weights = await self.fetch(name)
        if not weights:
            log.warning("adapter %s is empty", name)
            return None
        slot = await self.slots.assign()  # clean: near miss, in the table until shrink or unload frees it
        rank = self.slots.write(slot, weights)
        adapter = Adapter(name, slot, rank)
        self.loaded[name] = adapter
        return adapter

    def deactivate(self, adapter: Adapter) -> None:
        adapter.active -= 1
        self.shrink()

    def shrink(self) -> None:
        for name in [n for n, a in self.loaded.items() if a.active == 0]:
            if len(self.loaded) <= self.keep:
                break
            self.slots.unassign(self.loaded.pop(name).slot)

    def unload_all(self) -> None:
        for adapter in self.loaded.values():
            self.slots.unassign(adapter.slot)
        self.loaded.clear()


class PinnedAdapters:
    """Adapters which an operator pins by hand; each has a slot of its own."""

    def __init__(self, slots: AdapterSlots, fetch: Fetch):
        self.slots, self.fetch = slots, fetch
        self.table: dict[str, Adapter] = {}

    async def pin(self, name: str) -> bool:
        slot = await self.slots.assign()  # leak: an adapter without weights returns with the slot assigned
        weights = await self.fetch(name)
        if not weights:
            return False
        old = self.table.pop(name, None)
        if old is not None:
            self.slots.unassign(old.slot)
        self.table[name] = Adapter(name, slot, self.slots.write(slot, weights))
        return True

    def unpin(self, name: str) -> None:
        adapter = self.table.pop(name, None)
        if adapter is not None:
            self.slots.unassign(adapter.slot)


class RouterAdapters:
    """Adapters chosen by a router; renamed when a new version is published."""

    def __init__(self, slots: AdapterSlots, fetch: Fetch):
        self.slots, self.fetch = slots, fetch
        self.table: dict[str, Adapter] = {}

    async def publish(self, name: str, version: int) -> int:
        weights = await self.fetch(f"{name}@{version}")
        slot = await self.slots.assign()  # leak: the former version's adapter is overwritten in the table
        rank = self.slots.write(slot, weights)
        self.table[name] = Adapter(name, slot, rank)
        return rank

    def withdraw(self, name: str) -> bool:
        if name not in self.table:
            return False
        self.slots.unassign(self.table.pop(name).slot)
        return True


async def publish_versions(router: RouterAdapters, name: str, versions: list[int]) -> list[int]:
    ranks = [await router.publish(name, v) for v in versions]
    router.withdraw(name)
    return ranks


@dataclass
class LoraRequest:
    rid: str
    adapter_name: str
    prompt: list[int]
    adapter: Adapter | None = None
    output: list[int] = field(default_factory=list)


class LoraScheduler:
    def __init__(self, manager: AdapterManager, limit: int):
        self.manager, self.limit = manager, limit
        self.running: dict[str, LoraRequest] = {}
        self.parked: list[LoraRequest] = []

    async def start(self, req: LoraRequest) -> bool:
        req.adapter = await self.manager.activate(req.adapter_name)  # leak: past the limit the request is parked and resume activates anew
        if req.adapter is None:
            return False
        if len(self.running) >= self.limit:
            self.parked.append(req)
            return False
        self.running[req.rid] = req
        return True

    async def resume(self) -> int:
        count = 0
        while self.parked and len(self.running) < self.limit:
            req = self.parked.pop(0)
            req.adapter = await self.manager.activate(req.adapter_name)  # clean: near miss, in running, deactivated by finish
            if req.adapter is None:
                continue
            self.running[req.rid] = req
            count += 1
        return count

    def finish(self, rid: str) -> list[int]:
        req = self.running.pop(rid)
        if req.adapter is not None:
            self.manager.deactivate(req.adapter)
            req.adapter = None
        return req.output


@asynccontextmanager
async def using(manager: AdapterManager, name: str):
    adapter = await manager.activate(name)  # clean: deactivated when the block ends
    try:
        yield adapter
    finally:
        if adapter is not None:
            manager.deactivate(adapter)


async def rank_of(manager: AdapterManager, name: str) -> int:
    async with using(manager, name) as adapter:  # clean: the manager deactivates
        return 0 if adapter is None else adapter.rank


async def activate_group(manager: AdapterManager, names: list[str]) -> list[Adapter] | None:
    """All or none."""
    got: list[Adapter] = []
    for name in names:
        adapter = await manager.activate(name)  # clean: deactivated when another is refused, else returned
        if adapter is None:
            for other in got:
                manager.deactivate(other)
            return None
        got.append(adapter)
    return got


async def blend(manager: AdapterManager, names: list[str], weights: list[float]) -> torch.Tensor | None:
    group = await activate_group(manager, names)  # leak: weights that sum to zero return with the group active
    if group is None:
        return None
    total = sum(weights)
    if total == 0:
        return None
    out = sum(w / total * manager.slots.a[g.slot] for w, g in zip(weights, group))
    for adapter in group:
        manager.deactivate(adapter)
    return out


async def load_with_deadline(manager: AdapterManager, name: str, seconds: float, tries: int) -> Adapter | None:
    """The adapter comes active. Too slow a load is given up."""
    for attempt in range(tries):
        start = time.monotonic()
        adapter = await manager.activate(name)  # clean: near miss, returned when quick enough, deactivated otherwise
        if adapter is None:
            await asyncio.sleep(0.1 * attempt)
            continue
        if time.monotonic() - start <= seconds:
            return adapter
        manager.deactivate(adapter)
    return None


class Switch:
    """The adapter in use by a session, changed between turns."""

    def __init__(self, manager: AdapterManager):
        self.manager = manager
        self.current: Adapter | None = None

    async def to(self, name: str) -> bool:
        if self.current is not None and self.current.name == name:
            return True
        nxt = await self.manager.activate(name)  # clean: near miss, becomes current, and the former is deactivated
        if nxt is None:
            return False
        if self.current is not None:
            self.manager.deactivate(self.current)
        self.current = nxt
        return True

    async def off(self) -> None:
        if self.current is not None:
            self.manager.deactivate(self.current)
            self.current = None


async def chat(manager: AdapterManager, turns: list[tuple[str, str]], say: Callable[[Adapter, str], str]) -> list[str]:
    switch = Switch(manager)
    replies = []
    for name, text in turns:
        if not await switch.to(name):
            replies.append("")
            continue
        replies.append(say(switch.current, text))
    await switch.off()
    return replies


async def preview(manager: AdapterManager, names: list[str], say: Callable[[Adapter, str], str]) -> list[str]:
    """One line from each adapter."""
    current: Adapter | None = None
    lines = []
    for name in names:
        current = await manager.activate(name)  # leak: only the last adapter is deactivated
        if current is not None:
            lines.append(say(current, "hello"))
    if current is not None:
        manager.deactivate(current)
    return lines
