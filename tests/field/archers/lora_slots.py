"""LoRA adapters on the device: slots, pins by requests, prefetch by tasks."""
from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Iterable

log = logging.getLogger("lora")


class RankError(ValueError):
    pass


class SlotPool:
    def __init__(self, count: int) -> None:
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(count):
            self._queue.put_nowait(slot)

    async def take(self) -> int:
        return await self._queue.get()  # clean: returned to the caller

    def take_nowait(self) -> int | None:
        try:
            return self._queue.get_nowait()  # clean: returned to the caller
        except asyncio.QueueEmpty:
            return None

    def give(self, slot: int) -> None:
        self._queue.put_nowait(slot)


@dataclass(eq=False)
class Adapter:
    name: str
    slot: int
    weights: dict[str, Any]
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)


class AdapterManager:
    def __init__(self, slots: SlotPool, fetch: Callable[[str], Awaitable[dict[str, Any]]], device_rank: int = 128) -> None:
        self.slots = slots
        self._fetch = fetch
        self._device_rank = device_rank
        self._resident: dict[str, Adapter] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}

    def _check_rank(self, name: str, weights: dict[str, Any]) -> None:
        if weights["rank"] > self._device_rank:
            raise RankError(f"{name}: rank {weights['rank']} exceeds {self._device_rank}")

    async def _obtain_slot(self) -> int:
        slot = self.slots.take_nowait()  # clean: returned when there is one
        if slot is not None:
            return slot
        self._evict_idle()
        return await self.slots.take()  # clean: returned to the caller

    def _evict_idle(self) -> None:
        idle = [a for a in self._resident.values() if a.users == 0]
        if not idle:
            return
        victim = min(idle, key=lambda a: a.last_used)
        del self._resident[victim.name]
        self.slots.give(victim.slot)

    async def pin(self, name: str) -> Adapter | None:
        if (loading := self._loading.get(name)) is not None:
            await asyncio.wait([loading])
        adapter = self._resident.get(name)
        if adapter is None:
            slot = await self._obtain_slot()  # leak: only the missing file gives the slot back, the rank error leaves with it
            try:
                weights = await self._fetch(name)
                self._check_rank(name, weights)
            except FileNotFoundError:
                self.slots.give(slot)
                return None
            adapter = self._resident.get(name)
            if adapter is None:
                adapter = self._resident[name] = Adapter(name, slot, weights)
            else:
                self.slots.give(slot)
        adapter.users += 1
        adapter.last_used = time.monotonic()
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        adapter.users -= 1

    def prefetch(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._resident or name in self._loading:
                continue
            slot = self.slots.take_nowait()  # clean: near miss, the load task keeps it in an adapter or gives it back
            if slot is None:
                break
            task = asyncio.create_task(self._load_into(name, slot))
            self._loading[name] = task
            task.add_done_callback(lambda _t, n=name: self._loading.pop(n, None))

    async def _load_into(self, name: str, slot: int) -> None:
        try:
            weights = await self._fetch(name)
            self._check_rank(name, weights)
        except Exception as exc:
            log.warning("prefetch of %s failed: %s", name, exc)
            self.slots.give(slot)
            return
        if name in self._resident:
            self.slots.give(slot)
            return
        self._resident[name] = Adapter(name, slot, weights)

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Adapter]:
        adapter = await self.pin(name)  # clean: unpinned by the finally; None holds nothing
        if adapter is None:
            raise LookupError(name)
        try:
            yield adapter
        finally:
            self.unpin(adapter)

    async def close(self) -> None:
        if self._loading:
            await asyncio.wait(list(self._loading.values()))
        for adapter in list(self._resident.values()):
            if adapter.users:
                log.warning("%s still has %d users", adapter.name, adapter.users)
                continue
            del self._resident[adapter.name]
            self.slots.give(adapter.slot)


@dataclass
class Request:
    rid: str
    adapter: str | None
    error: str | None = None


@dataclass
class Batch:
    manager: AdapterManager
    rows: list[tuple[Request, Adapter | None]] = field(default_factory=list)

    def finish(self) -> None:
        for _, adapter in self.rows:
            if adapter is not None:
                self.manager.unpin(adapter)
        self.rows.clear()


async def build_batch(manager: AdapterManager, requests: Iterable[Request], max_rank: int) -> Batch:
    batch = Batch(manager)
    for req in requests:
        if req.adapter is None:
            batch.rows.append((req, None))
            continue
        adapter = await manager.pin(req.adapter)  # leak: a rank above the batch limit is skipped with the pin held
        if adapter is None:
            req.error = "unknown adapter"
            continue
        if adapter.weights["rank"] > max_rank:
            req.error = "rank too large for this batch"
            continue
        batch.rows.append((req, adapter))
    return batch


async def blend(manager: AdapterManager, left: str, right: str, alpha: float) -> dict[str, Any] | None:
    a = await manager.pin(left)  # leak: stays pinned when the right adapter is unknown
    if a is None:
        return None
    b = await manager.pin(right)  # clean: None holds nothing, otherwise the finally unpins it
    if b is None:
        return None
    try:
        return {k: alpha * a.weights[k] + (1 - alpha) * b.weights[k] for k in a.weights.keys() & b.weights.keys()}
    finally:
        manager.unpin(b)
        manager.unpin(a)


async def norm(manager: AdapterManager, name: str) -> float:
    async with manager.using(name) as adapter:  # clean: the context manager unpins
        return sum(float(v) ** 2 for k, v in adapter.weights.items() if k != "rank") ** 0.5


async def warm(manager: AdapterManager, names: list[str]) -> None:
    pinned: list[Adapter] = []
    try:
        for name in names:
            adapter = await manager.pin(name)  # leak: a rank error ends the warm-up and those pinned before stay pinned
            if adapter is not None:
                pinned.append(adapter)
    except RankError as exc:
        log.warning("warm-up stopped: %s", exc)
        return
    for adapter in pinned:
        manager.unpin(adapter)


class DraftAdapter:
    def __init__(self, manager: AdapterManager) -> None:
        self.manager = manager
        self.current: Adapter | None = None

    async def reload(self, name: str) -> bool:
        fresh = await self.manager.pin(name)  # clean: near miss, takes the place of the old pin, which is undone; close() undoes the last
        if fresh is None:
            return False
        old, self.current = self.current, fresh
        if old is not None:
            self.manager.unpin(old)
        return True

    def close(self) -> None:
        if self.current is not None:
            self.manager.unpin(self.current)
            self.current = None


@dataclass
class ChatSession:
    sid: str
    adapter: Adapter | None = None
    touched: float = field(default_factory=time.monotonic)


class SessionTable:
    def __init__(self, manager: AdapterManager, ttl: float = 600.0) -> None:
        self.manager = manager
        self.ttl = ttl
        self._sessions: dict[str, ChatSession] = {}

    async def open(self, sid: str, name: str) -> ChatSession:
        if (known := self._sessions.get(sid)) is not None:
            known.touched = time.monotonic()
            return known
        session = self._sessions[sid] = ChatSession(sid)
        session.adapter = await self.manager.pin(name)  # leak: expire() deletes old sessions without undoing their pin
        return session

    def leave(self, sid: str) -> None:
        session = self._sessions.pop(sid, None)
        if session is not None and session.adapter is not None:
            self.manager.unpin(session.adapter)

    def expire(self) -> None:
        cut = time.monotonic() - self.ttl
        for sid in [s.sid for s in self._sessions.values() if s.touched < cut]:
            del self._sessions[sid]
