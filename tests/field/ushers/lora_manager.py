"""LoRA multiplexing: device slots, host staging and pinned adapters."""
from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Optional, Protocol

logger = logging.getLogger(__name__)


class AdapterNotFound(Exception):
    pass


class AdapterStore(Protocol):
    async def read_into(self, name: str, out: bytearray) -> int: ...


@dataclass
class AdapterEntry:
    name: str
    slot: int
    rank: int = 0
    refs: int = 0


@dataclass
class Session:
    sid: str
    entry: Optional[AdapterEntry] = None
    fallback: Optional[AdapterEntry] = None


class SlotPool:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def acquire(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        self._free.append(slot)


class StagingArea:
    def __init__(self, count: int, nbytes: int) -> None:
        self._bufs: asyncio.Queue[bytearray] = asyncio.Queue()
        for _ in range(count):
            self._bufs.put_nowait(bytearray(nbytes))

    async def lease(self) -> bytearray:
        return await self._bufs.get()

    def give_back(self, buf: bytearray) -> None:
        self._bufs.put_nowait(buf)


class AdapterManager:
    def __init__(self, slots: SlotPool, stages: StagingArea, store: AdapterStore) -> None:
        self._slots = slots
        self._stages = stages
        self._store = store
        self._entries: OrderedDict[str, AdapterEntry] = OrderedDict()

    async def pin(self, name: str) -> Optional[AdapterEntry]:
        entry = self._entries.get(name)
        if entry is not None:
            self._entries.move_to_end(name)
            entry.refs += 1
            return entry
        slot = self._slots.acquire()  # leak: lost when the adapter is not in the store
        if slot is None:
            slot = self._steal_idle()  # leak: a stolen slot is lost likewise when the adapter is missing
            if slot is None:
                return None
        stage = await self._stages.lease()  # clean: near miss, given back on both ways
        try:
            rank = await self._store.read_into(name, stage)
        except AdapterNotFound:
            self._stages.give_back(stage)
            return None
        self._stages.give_back(stage)
        entry = AdapterEntry(name, slot, rank, refs=1)
        self._entries[name] = entry
        return entry

    def unpin(self, entry: AdapterEntry) -> None:
        entry.refs -= 1

    def _steal_idle(self) -> Optional[int]:
        for name, entry in self._entries.items():
            if entry.refs == 0:
                del self._entries[name]
                return entry.slot
        return None

    def evict(self, name: str) -> bool:
        entry = self._entries.get(name)
        if entry is None or entry.refs:
            return False
        del self._entries[name]
        self._slots.release(entry.slot)
        return True


class LoraFrontend:
    def __init__(self, manager: AdapterManager, engine, max_per_batch: int = 8) -> None:
        self.manager = manager
        self.engine = engine
        self.max_per_batch = max_per_batch
        self._preloaded: list[AdapterEntry] = []

    async def preload(self, names: list[str]) -> int:
        for name in names:
            entry = await self.manager.pin(name)  # clean: near miss, kept in _preloaded until close
            if entry is not None:
                self._preloaded.append(entry)
        return len(self._preloaded)

    def close(self) -> None:
        while self._preloaded:
            self.manager.unpin(self._preloaded.pop())

    async def generate(self, name: str, prompt: str) -> Optional[str]:
        entry = await self.manager.pin(name)  # clean: finally
        if entry is None:
            return None
        try:
            return await self.engine.generate(prompt, lora_slot=entry.slot)
        finally:
            self.manager.unpin(entry)

    async def run_batch(self, items: list[tuple[str, str]]) -> list[str]:
        active: list[tuple[AdapterEntry, str]] = []
        for name, prompt in items:
            entry = await self.manager.pin(name)  # leak: the one over the limit is pinned and dropped by break
            if entry is None:
                continue
            if len(active) >= self.max_per_batch:
                break
            active.append((entry, prompt))
        out = await self.engine.generate_many([(e.slot, p) for e, p in active])
        for entry, _ in active:
            self.manager.unpin(entry)
        return out

    async def open_session(self, sid: str, name: str) -> Session:
        session = Session(sid)
        session.entry = await self.manager.pin(name)  # clean: close_session unpins
        return session

    async def set_fallback(self, session: Session, name: str) -> bool:
        session.fallback = await self.manager.pin(name)  # leak: a former fallback is overwritten
        return session.fallback is not None

    async def switch(self, session: Session, name: str) -> bool:
        entry = await self.manager.pin(name)  # clean: near miss, the former entry is unpinned before it is replaced
        if entry is None:
            return False
        if session.entry is not None:
            self.manager.unpin(session.entry)
        session.entry = entry
        return True

    def close_session(self, session: Session) -> None:
        for entry in (session.entry, session.fallback):
            if entry is not None:
                self.manager.unpin(entry)
        session.entry = session.fallback = None

    async def blend(self, first: str, second: str, prompt: str) -> Optional[str]:
        a = await self.manager.pin(first)  # leak: stays pinned when the second adapter is missing
        if a is None:
            return None
        b = await self.manager.pin(second)  # clean: unpinned below
        if b is None:
            return None
        text = await self.engine.generate_blend(prompt, (a.slot, b.slot))
        self.manager.unpin(b)
        self.manager.unpin(a)
        return text

    async def compare(self, first: str, second: str, prompt: str) -> Optional[bool]:
        a = await self.manager.pin(first)  # clean: near miss, unpinned where the second fails
        if a is None:
            return None
        b = await self.manager.pin(second)  # clean: unpinned below
        if b is None:
            self.manager.unpin(a)
            return None
        left = await self.engine.generate(prompt, lora_slot=a.slot)
        right = await self.engine.generate(prompt, lora_slot=b.slot)
        for entry in (a, b):
            self.manager.unpin(entry)
        return left == right

    async def warm(self, name: str) -> bool:
        entry = await self.manager.pin(name)  # clean: near miss, cancellation unpins too
        if entry is None:
            return False
        try:
            await self.engine.warmup(entry.slot)
        except asyncio.CancelledError:
            self.manager.unpin(entry)
            raise
        self.manager.unpin(entry)
        return True
