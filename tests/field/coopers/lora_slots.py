"""Adapter residency for multi-LoRA decoding: GPU slots, host arena, per-request pins."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Optional

log = logging.getLogger("lora")


@dataclass
class AdapterMeta:
    path: str
    rank: int
    nbytes: int
    max_len: int = 8192


@dataclass(eq=False)
class Reservation:
    offset: int
    nbytes: int


class HostArena:
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = 0
        self._live: set[Reservation] = set()

    def reserve(self, nbytes: int) -> Optional[Reservation]:
        if self.used + nbytes > self.capacity:
            return None
        r = Reservation(self.used, nbytes)
        self.used += nbytes
        self._live.add(r)
        return r

    def release(self, r: Reservation) -> None:
        self._live.discard(r)
        self.used -= r.nbytes


class SlotTable:
    def __init__(self, n: int):
        self._free = list(range(n))
        self._owner: dict[int, str] = {}

    def take(self, adapter: str) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()
        self._owner[slot] = adapter
        return slot

    def give(self, slot: int) -> None:
        self._owner.pop(slot, None)
        self._free.append(slot)


@dataclass
class Adapter:
    name: str
    meta: AdapterMeta
    slot: int
    host: Reservation
    users: int = 0


@dataclass
class Req:
    rid: str
    adapter: str
    prompt: list[int]


class AdapterManager:
    def __init__(self, catalog: dict[str, AdapterMeta], slots: SlotTable, arena: HostArena, engine: Any):
        self.catalog = catalog
        self.slots = slots
        self.arena = arena
        self.engine = engine
        self.resident: dict[str, Adapter] = {}
        self.running: dict[str, Adapter] = {}

    async def load(self, name: str) -> bool:
        if name in self.resident:
            return True
        meta = self.catalog.get(name)
        if meta is None:
            return False
        host = self.arena.reserve(meta.nbytes)  # leak: when the slot table is full the reservation is forgotten
        if host is None:
            return False
        slot = self.slots.take(name)  # leak: a failed upload releases the arena only, not the slot
        if slot is None:
            return False
        try:
            await self.engine.upload(meta.path, host.offset, slot)
        except OSError as e:
            log.warning("loading %s: %s", name, e)
            self.arena.release(host)
            return False
        self.resident[name] = Adapter(name, meta, slot, host)
        return True

    def unload(self, name: str) -> bool:
        ad = self.resident.get(name)
        if ad is None or ad.users:
            return False
        del self.resident[name]
        self.slots.give(ad.slot)
        self.arena.release(ad.host)
        return True

    def pin(self, name: str) -> Optional[Adapter]:
        ad = self.resident.get(name)
        if ad is None:
            return None
        ad.users += 1
        return ad

    def unpin(self, ad: Adapter) -> None:
        ad.users -= 1

    async def refresh(self, name: str) -> bool:
        """Upload a newer revision next to the live one, then flip."""
        ad = self.pin(name)  # clean: near miss, the finally unpins on each of the three returns
        if ad is None:
            return False
        try:
            slot = self.slots.take(name)  # clean: near miss, a failed upload gives it back, success swaps it with the old one
            if slot is None:
                return False
            try:
                await self.engine.upload(ad.meta.path, ad.host.offset, slot)
            except OSError:
                self.slots.give(slot)
                return False
            old, ad.slot = ad.slot, slot
            self.slots.give(old)
            return True
        finally:
            self.unpin(ad)

    async def generate(self, req: Req) -> dict[str, Any]:
        ad = self.pin(req.adapter)  # leak: the too-long reply leaves before the try that unpins
        if ad is None:
            return {"status": 404}
        if len(req.prompt) > ad.meta.max_len:
            return {"status": 400, "error": "prompt too long"}
        try:
            text = await self.engine.run(req.prompt, ad.slot)
        finally:
            self.unpin(ad)
        return {"status": 200, "text": text}

    async def stream(self, req: Req, sink: asyncio.Queue) -> int:
        ad = self.pin(req.adapter)  # clean: near miss, cancellation and early break both run the finally
        if ad is None:
            return 0
        n = 0
        try:
            async for tok in self.engine.tokens(req.prompt, ad.slot):
                if tok is None:
                    return n
                await sink.put(tok)
                n += 1
        except asyncio.CancelledError:
            log.info("%s cancelled after %d", req.rid, n)
            raise
        finally:
            self.unpin(ad)
        return n

    def assemble(self, waiting: list[Req], rank_budget: int) -> list[Req]:
        batch = []
        for req in waiting:
            if req.rid in self.running:
                continue
            ad = self.pin(req.adapter)  # leak: a request over the rank budget is skipped with its pin
            if ad is None:
                continue
            if ad.meta.rank > rank_budget:
                continue
            rank_budget -= ad.meta.rank
            self.running[req.rid] = ad
            batch.append(req)
        return batch

    def finish(self, rid: str) -> None:
        ad = self.running.pop(rid, None)
        if ad is not None:
            self.unpin(ad)

    def how_many_fit(self, names: list[str]) -> int:
        held = []
        for name in names:
            r = self.arena.reserve(self.catalog[name].nbytes)  # clean: near miss, trial reservations are all released below
            if r is None:
                break
            held.append(r)
        for r in held:
            self.arena.release(r)
        return len(held)
