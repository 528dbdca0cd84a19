"""LoRA adapters: a host cache of pinned weights and a fixed number of device slots."""
from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import AsyncIterator, Iterable, Optional

logger = logging.getLogger("serve.lora")


class HostEntry:
    __slots__ = ("name", "rank", "payload", "pins")

    def __init__(self, name: str, rank: int, payload: bytes) -> None:
        self.name = name
        self.rank = rank
        self.payload = payload
        self.pins = 0


class HostAdapterCache:
    """LRU; a pinned entry is never evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[str, HostEntry] = OrderedDict()

    def insert(self, name: str, rank: int, payload: bytes) -> None:
        self._entries[name] = HostEntry(name, rank, payload)
        for key in list(self._entries):
            if len(self._entries) <= self.capacity:
                break
            if self._entries[key].pins == 0:
                del self._entries[key]

    def pin(self, name: str) -> Optional[HostEntry]:
        entry = self._entries.get(name)
        if entry is None:
            return None
        entry.pins += 1
        self._entries.move_to_end(name)
        return entry

    def unpin(self, entry: HostEntry) -> None:
        entry.pins -= 1


class DeviceSlots:
    def __init__(self, n: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        for i in range(n):
            self._idle.put_nowait(i)

    async def obtain(self) -> int:
        return await self._idle.get()

    def obtain_nowait(self) -> Optional[int]:
        if self._idle.empty():
            return None
        return self._idle.get_nowait()

    def surrender(self, slot: int) -> None:
        self._idle.put_nowait(slot)


class LoraManager:
    def __init__(self, host: HostAdapterCache, slots: DeviceSlots) -> None:
        self.host = host
        self.slots = slots
        self._active: dict[str, tuple[int, HostEntry]] = {}
        self._users: dict[str, int] = {}
        self._by_request: dict[str, HostEntry] = {}
        self._loading = asyncio.Lock()

    async def _upload(self, slot: int, entry: HostEntry) -> bool:
        await asyncio.sleep(0)
        return len(entry.payload) % 2 == 0

    async def activate(self, name: str) -> Optional[int]:
        async with self._loading:
            return await self._activate(name)  # clean: handed to the caller

    async def _activate(self, name: str) -> Optional[int]:
        if name in self._active:
            self._users[name] += 1
            return self._active[name][0]
        entry = self.host.pin(name)  # clean: filed in _active, unpinned by deactivate() or on refusal
        if entry is None:
            return None
        if entry.rank > self.slots.max_rank:
            self.host.unpin(entry)
            return None
        slot = await self.slots.obtain()  # clean: filed in _active, surrendered when the upload is refused
        if not await self._upload(slot, entry):
            self.slots.surrender(slot)
            self.host.unpin(entry)
            return None
        self._active[name] = (slot, entry)
        self._users[name] = 1
        return slot

    def deactivate(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name]:
            return
        slot, entry = self._active.pop(name)
        del self._users[name]
        self.slots.surrender(slot)
        self.host.unpin(entry)

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Optional[int]]:
        slot = await self.activate(name)  # clean: deactivated in the finally
        try:
            yield slot
        finally:
            if slot is not None:
                self.deactivate(name)

    async def replace(self, old: str, new: str) -> bool:
        """Loads new into the slot that old holds."""
        if old not in self._active or new in self._active:
            return False
        entry = self.host.pin(new)  # leak: an adapter of too high a rank leaves the pin behind
        if entry is None:
            return False
        if entry.rank > self.slots.max_rank:
            logger.warning("rank of %s too high: %d", new, entry.rank)
            return False
        slot, previous = self._active.pop(old)
        users = self._users.pop(old)
        await self._upload(slot, entry)
        self.host.unpin(previous)
        self._active[new] = (slot, entry)
        self._users[new] = users
        return True

    async def verify(self, names: Iterable[str]) -> list[str]:
        """Uploads every adapter once into a free slot, to see that its shapes are right."""
        broken: list[str] = []
        slot = await self.slots.obtain()  # leak: an adapter that is missing ends the check with the slot out
        for name in names:
            entry = self.host.pin(name)  # leak: a broken adapter goes on to the next without unpin
            if entry is None:
                return broken + [name]
            if not await self._upload(slot, entry):
                broken.append(name)
                continue
            self.host.unpin(entry)
        self.slots.surrender(slot)
        return broken

    def attach(self, rid: str, name: str) -> bool:
        entry = self.host.pin(name)  # clean: detach() unpins by request id
        if entry is None:
            return False
        stale = self._by_request.pop(rid, None)
        if stale is not None:
            self.host.unpin(stale)
        self._by_request[rid] = entry
        return True

    def attach_default(self, rid: str, name: str) -> HostEntry | None:
        fresh = self.host.pin(name)  # leak: setdefault keeps the older entry and the fresh pin is lost
        if fresh is None:
            return None
        return self._by_request.setdefault(rid, fresh)

    def detach(self, rid: str) -> None:
        entry = self._by_request.pop(rid, None)
        if entry is not None:
            self.host.unpin(entry)

    def rank_of(self, name: str) -> int:
        entry = self.host.pin(name)  # leak: only the rank is read
        return entry.rank if entry is not None else 0


class LoraRunner:
    def __init__(self, manager: LoraManager) -> None:
        self.manager = manager
        self.fallbacks = 0

    async def run(self, rid: str, name: str, tokens: list[int]) -> list[int]:
        async with self.manager.using(name) as slot:  # clean: near miss, the return inside leaves it properly
            if slot is None:
                self.fallbacks += 1
                return tokens
            return [t ^ slot for t in tokens]

    async def run_many(self, name: str, prompts: list[list[int]]) -> list[list[int]]:
        out: list[list[int]] = []
        slot = await self.manager.activate(name)  # leak: an empty prompt returns before deactivate()
        if slot is None:
            return prompts
        for prompt in prompts:
            if not prompt:
                return out
            out.append([t ^ slot for t in prompt])
        self.manager.deactivate(name)
        return out
