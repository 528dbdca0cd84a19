"""LoRA adapter residency: device slots, host staging buffers and the async paths that use them."""
from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Optional


class DeviceSlots:
    """Adapter name -> device slot; a slot may be evicted once nobody has it checked out."""

    def __init__(self, count: int) -> None:
        self._owner: list[Optional[str]] = [None] * count
        self._users: dict[int, int] = defaultdict(int)
        self._cond = asyncio.Condition()

    async def checkout(self, name: str) -> int:
        async with self._cond:
            while True:
                slot = self._find(name)
                if slot is not None:
                    self._owner[slot] = name
                    self._users[slot] += 1
                    return slot
                await self._cond.wait()

    async def checkin(self, slot: int) -> None:
        async with self._cond:
            self._users[slot] -= 1
            self._cond.notify_all()

    def _find(self, name: str) -> Optional[int]:
        if name in self._owner:
            return self._owner.index(name)
        for slot in range(len(self._owner)):
            if self._users[slot] == 0:
                return slot
        return None

    def resident(self, name: str) -> bool:
        return name in self._owner


class StagingArena:
    def __init__(self, count: int, size: int) -> None:
        self._bufs = [bytearray(size) for _ in range(count)]

    def borrow(self) -> Optional[bytearray]:
        return self._bufs.pop() if self._bufs else None

    def give_back(self, buf: bytearray) -> None:
        self._bufs.append(buf)


@dataclass
class GenRequest:
    rid: str
    adapter: str
    prompt: list[int]
    slot: Optional[int] = None


class AdapterManager:
    def __init__(self, root: str, slots: DeviceSlots, arena: StagingArena) -> None:
        self.root = root
        self.slots = slots
        self.arena = arena
        self.cancelled: set[str] = set()
        self.sizes: dict[str, int] = {}

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name, "adapter_model.bin")

    def _read_into(self, name: str, buf: bytearray) -> int:
        with open(self._path(name), "rb") as fh:  # clean: closed by with
            return fh.readinto(buf)

    async def acquire_adapter(self, name: str) -> Optional[int]:
        if self.slots.resident(name):
            return await self.slots.checkout(name)  # clean: handed to the caller
        buf = self.arena.borrow()  # clean: given back on both ways out
        if buf is None:
            return None
        count = await asyncio.to_thread(self._read_into, name, buf)
        if count == 0:
            self.arena.give_back(buf)
            return None
        slot = await self.slots.checkout(name)  # clean: handed to the caller
        await self._upload(slot, memoryview(buf)[:count])
        self.arena.give_back(buf)
        return slot

    async def _upload(self, slot: int, data: memoryview) -> None:
        self.sizes[f"slot{slot}"] = len(data)
        await asyncio.sleep(0)

    def adapter_rank(self, name: str) -> int:
        header = open(self._path(name), "rb")  # leak: returns without close on a bad magic
        magic = header.read(4)
        if magic != b"LORA":
            return 0
        rank = int.from_bytes(header.read(2), "little")
        header.close()
        return rank

    async def prefetch(self, names: list[str]) -> int:
        ready = 0
        for name in names:
            if self.slots.resident(name):
                continue
            buf = self.arena.borrow()  # leak: the empty-file continue skips give_back
            if buf is None:
                break
            count = await asyncio.to_thread(self._read_into, name, buf)
            if count == 0:
                continue
            slot = await self.slots.checkout(name)  # clean: checked in after the upload, stays resident
            await self._upload(slot, memoryview(buf)[:count])
            await self.slots.checkin(slot)
            self.arena.give_back(buf)
            ready += 1
        return ready

    async def serve(self, req: GenRequest) -> list[int]:
        slot = await self.acquire_adapter(req.adapter)  # clean: checked in by finally
        if slot is None:
            return []
        try:
            return await self._decode(req, slot)
        finally:
            await self.slots.checkin(slot)

    async def serve_cancellable(self, req: GenRequest) -> Optional[list[int]]:
        slot = await self.acquire_adapter(req.adapter)  # leak: cancelled requests return with it checked out
        if slot is None:
            return None
        if req.rid in self.cancelled:
            self.cancelled.discard(req.rid)
            return None
        out = await self._decode(req, slot)
        await self.slots.checkin(slot)
        return out

    async def continue_turn(self, req: GenRequest) -> list[int]:
        """Use the slot that the request holds already, else take one for this turn only."""
        mine = req.slot is None
        slot = req.slot
        if mine:
            slot = await self.slots.checkout(req.adapter)  # clean: near miss, `mine` guards the checkin
        out = await self._decode(req, slot)
        if mine:
            await self.slots.checkin(slot)
        return out

    async def continue_or_keep(self, req: GenRequest, sticky: bool) -> list[int]:
        temporary = False
        slot = req.slot
        if slot is None:
            slot = await self.slots.checkout(req.adapter)  # leak: not sticky and temporary never set True
            if sticky:
                req.slot = slot
        out = await self._decode(req, slot)
        if temporary:
            await self.slots.checkin(slot)
        return out

    async def end_session(self, req: GenRequest) -> None:
        if req.slot is not None:
            slot, req.slot = req.slot, None
            await self.slots.checkin(slot)

    async def run_batch(self, reqs: list[GenRequest]) -> dict[str, list[int]]:
        held: dict[str, int] = {}
        out: dict[str, list[int]] = {}
        try:
            for req in reqs:
                if req.adapter not in held:
                    held[req.adapter] = await self.slots.checkout(req.adapter)  # clean: drained in finally
                out[req.rid] = await self._decode(req, held[req.adapter])
        finally:
            for slot in held.values():
                await self.slots.checkin(slot)
        return out

    async def any_resident(self, names: list[str]) -> Optional[int]:
        """A checked-out slot of whichever adapter is first in the list."""
        got = await asyncio.gather(*(self.slots.checkout(n) for n in names))  # leak: only got[0] is passed on
        if not got:
            return None
        return got[0]

    async def merge_pair(self, left: str, right: str) -> Optional[int]:
        a = await self.acquire_adapter(left)  # leak: not checked in when the right adapter is missing
        if a is None:
            return None
        b = await self.acquire_adapter(right)  # clean: checked in after the merge
        if b is None:
            return None
        merged = self.sizes.get(f"slot{a}", 0) + self.sizes.get(f"slot{b}", 0)
        await self.slots.checkin(a)
        await self.slots.checkin(b)
        return merged

    async def _decode(self, req: GenRequest, slot: Optional[int]) -> list[int]:
        await asyncio.sleep(0)
        return [t ^ (slot or 0) for t in req.prompt]
