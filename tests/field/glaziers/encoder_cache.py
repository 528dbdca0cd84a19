"""Budgeted cache of multimodal encoder outputs, shared between requests by content hash."""
from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import NamedTuple, Optional

logger = logging.getLogger("mm.encoder_cache")


class MMItem(NamedTuple):
    mm_hash: str
    num_tokens: int
    url: str


class Embedding:
    def __init__(self, mm_hash: str, size: int) -> None:
        self.mm_hash = mm_hash
        self.size = size
        self.users = 0
        self.ready = asyncio.Event()
        self.value: Optional[list[float]] = None


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.entries: OrderedDict[str, Embedding] = OrderedDict()

    def reserve(self, item: MMItem) -> Optional[Embedding]:
        emb = self.entries.get(item.mm_hash)
        if emb is None:
            if not self._make_room(item.num_tokens):
                return None
            emb = self.entries[item.mm_hash] = Embedding(item.mm_hash, item.num_tokens)
            self.used += item.num_tokens
        emb.users += 1
        return emb

    def lookup(self, mm_hash: str) -> Optional[Embedding]:
        emb = self.entries.get(mm_hash)
        if emb is not None:
            emb.users += 1
            self.entries.move_to_end(mm_hash)
        return emb

    def unref(self, emb: Embedding) -> None:
        emb.users -= 1

    def _make_room(self, need: int) -> bool:
        for h in [h for h, e in self.entries.items() if e.users == 0]:
            if self.used + need <= self.capacity:
                break
            self.used -= self.entries.pop(h).size
        return self.used + need <= self.capacity


class FetchGate:
    """Caps the bytes of media in flight."""

    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._cond = asyncio.Condition()

    async def enter(self, weight: int = 1) -> None:
        async with self._cond:
            await self._cond.wait_for(lambda: self._permits >= weight)
            self._permits -= weight

    async def leave(self, weight: int = 1) -> None:
        async with self._cond:
            self._permits += weight
            self._cond.notify_all()


class MMRequest:
    def __init__(self, rid: str, items: list[MMItem]) -> None:
        self.rid = rid
        self.items = items
        self.embeds: list[Embedding] = []
        self.audio: Optional[Embedding] = None


class EncoderManager:
    def __init__(self, cache: EncoderCache, gate: FetchGate, fetcher, encoder) -> None:
        self.cache = cache
        self.gate = gate
        self.fetcher = fetcher
        self.encoder = encoder
        self.requests: dict[str, MMRequest] = {}

    def admit(self, req: MMRequest) -> bool:
        taken: list[Embedding] = []
        for item in req.items:
            emb = self.cache.reserve(item)  # clean: near miss, without room those taken before are unreferenced
            if emb is None:
                for e in taken:
                    self.cache.unref(e)
                return False
            taken.append(emb)
        req.embeds.extend(taken)
        self.requests[req.rid] = req
        return True

    def admit_eager(self, req: MMRequest) -> bool:
        taken: list[Embedding] = []
        for item in req.items:
            emb = self.cache.reserve(item)  # leak: no room for a later item returns with the earlier ones referenced
            if emb is None:
                return False
            taken.append(emb)
        req.embeds.extend(taken)
        self.requests[req.rid] = req
        return True

    def attach_audio(self, rid: str, item: MMItem) -> bool:
        req = self.requests[rid]
        emb = self.cache.reserve(item)  # leak: finish unreferences the embeds, but not the audio
        if emb is None:
            return False
        if req.audio is not None:
            self.cache.unref(req.audio)
        req.audio = emb
        return True

    def detach_audio(self, rid: str) -> None:
        req = self.requests[rid]
        if req.audio is not None:
            self.cache.unref(req.audio)
            req.audio = None

    def finish(self, rid: str) -> None:
        req = self.requests.pop(rid, None)
        if req is None:
            return
        for emb in req.embeds:
            self.cache.unref(emb)
        req.embeds = []

    async def fill(self, item: MMItem, emb: Embedding) -> None:
        await self.gate.enter()  # clean: near miss, left in the finally when cancelled too
        try:
            data = await self.fetcher(item.url)
        finally:
            await self.gate.leave()
        emb.value = self.encoder(data)
        emb.ready.set()

    async def fill_video(self, item: MMItem, emb: Embedding) -> bool:
        await self.gate.enter(4)  # leak: leave gives one permit of the four
        try:
            data = await self.fetcher(item.url)
        finally:
            await self.gate.leave()
        emb.value = self.encoder(data)
        emb.ready.set()
        return True

    async def fill_batch(self, pairs: list[tuple[MMItem, Embedding]]) -> int:
        n = 0
        for item, emb in pairs:
            await self.gate.enter()  # leak: a download that times out goes on to the next without leaving
            try:
                data = await asyncio.wait_for(self.fetcher(item.url), 10.0)
            except asyncio.TimeoutError:
                logger.warning("timeout fetching %s", item.url)
                continue
            await self.gate.leave()
            emb.value = self.encoder(data)
            emb.ready.set()
            n += 1
        return n

    async def wait_ready(self, mm_hash: str, timeout: float) -> Optional[list[float]]:
        emb = self.cache.lookup(mm_hash)  # clean: near miss, the timeout's return passes the finally
        if emb is None:
            return None
        try:
            await asyncio.wait_for(emb.ready.wait(), timeout)
            return emb.value
        except asyncio.TimeoutError:
            return None
        finally:
            self.cache.unref(emb)

    def is_ready(self, mm_hash: str) -> bool:
        emb = self.cache.lookup(mm_hash)  # leak: lookup counts a user, whom nobody takes off
        return emb is not None and emb.ready.is_set()

    def num_users(self, mm_hash: str) -> int:
        emb = self.cache.lookup(mm_hash)  # clean: near miss, taken off before the count is read
        if emb is None:
            return 0
        self.cache.unref(emb)
        return emb.users
