"""HTTP-facing gateway that spreads embedding calls over a handful of replicas."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import AsyncIterator, Optional

log = logging.getLogger("gateway.embed")


class Throttled(RuntimeError):
    pass


class BackendDown(RuntimeError):
    pass


class Channel:
    """One framed TCP stream to a replica."""

    def __init__(self, endpoint: str):
        self.endpoint = endpoint
        self.opened_at = time.monotonic()
        self._reader = None
        self._writer = None

    def expired(self, ttl: float) -> bool:
        return time.monotonic() - self.opened_at > ttl

    async def call(self, op: str, payload):
        if self._writer is None:
            raise ConnectionError(self.endpoint)
        self._writer.write(repr((op, payload)).encode())
        await self._writer.drain()
        return await self._reader.readline()

    async def frames(self, op: str, payload):
        await self.call(op, payload)
        while True:
            line = await self._reader.readline()
            if not line:
                return
            yield line

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.close()


class ChannelPool:
    def __init__(self, endpoints, per_host: int = 8):
        self.endpoints = list(endpoints)
        self._idle = {ep: deque() for ep in self.endpoints}
        self._open = dict.fromkeys(self.endpoints, 0)
        self._per_host = per_host
        self._cond = asyncio.Condition()

    async def checkout(self, endpoint: str) -> Channel:
        async with self._cond:
            while True:
                if self._idle[endpoint]:
                    return self._idle[endpoint].pop()
                if self._open[endpoint] < self._per_host:
                    self._open[endpoint] += 1
                    return Channel(endpoint)
                await self._cond.wait()

    def checkout_nowait(self, endpoint: str) -> Optional[Channel]:
        if self._idle[endpoint]:
            return self._idle[endpoint].pop()
        return None

    async def checkin(self, chan: Channel) -> None:
        async with self._cond:
            self._idle[chan.endpoint].append(chan)
            self._cond.notify()

    async def discard(self, chan: Channel) -> None:
        chan.abort()
        async with self._cond:
            self._open[chan.endpoint] -= 1
            self._cond.notify()

    @contextlib.asynccontextmanager
    async def borrowed(self, endpoint: str):
        chan = await self.checkout(endpoint)  # clean: discarded on error, checked in otherwise
        try:
            yield chan
        except BaseException:
            await self.discard(chan)
            raise
        await self.checkin(chan)


class TenantPermits:
    def __init__(self, limits: dict[str, int]):
        self._left = dict(limits)

    def try_enter(self, tenant: str) -> bool:
        if self._left.get(tenant, 0) <= 0:
            return False
        self._left[tenant] -= 1
        return True

    def leave(self, tenant: str) -> None:
        self._left[tenant] += 1


class EmbedGateway:
    CHANNEL_TTL = 300.0

    def __init__(self, channels: ChannelPool, permits: TenantPermits, cache: dict):
        self.channels = channels
        self.permits = permits
        self.cache = cache
        self._pinned: dict[str, Channel] = {}

    def _pick(self, text: str) -> str:
        eps = self.channels.endpoints
        return eps[hash(text) % len(eps)]

    async def embed_one(self, tenant: str, text: str):
        if not self.permits.try_enter(tenant):  # leak: not left when the cache answers
            raise Throttled(tenant)
        cached = self.cache.get(text)
        if cached is not None:
            return cached
        try:
            async with self.channels.borrowed(self._pick(text)) as chan:  # clean: context manager
                vec = await chan.call("embed", [text])
        finally:
            self.permits.leave(tenant)
        self.cache[text] = vec
        return vec

    async def embed_failover(self, texts: list[str]):
        for endpoint in self.channels.endpoints:
            chan = await self.channels.checkout(endpoint)  # leak: ConnectionError goes to the next endpoint with it held
            try:
                vecs = await chan.call("embed", texts)
            except ConnectionError as exc:
                log.warning("replica %s refused: %s", endpoint, exc)
                continue
            await self.channels.checkin(chan)
            return vecs
        raise BackendDown("no replica answered")

    async def tokenize(self, endpoint: str, text: str) -> bytes:
        chan = await self.channels.checkout(endpoint)  # leak: rebound when the channel is expired
        if chan.expired(self.CHANNEL_TTL):
            log.debug("channel to %s too old", endpoint)
            chan = await self.channels.checkout(endpoint)  # clean: checked in by finally
        try:
            return await chan.call("tokenize", text)
        finally:
            await self.channels.checkin(chan)

    async def probe(self, endpoint: str) -> bool:
        chan = self.channels.checkout_nowait(endpoint)  # leak: kept when the replica is draining
        if chan is None:
            return True
        try:
            answer = await chan.call("ping", None)
        except ConnectionError:
            await self.channels.discard(chan)
            return False
        if answer == b"draining\n":
            return False
        await self.channels.checkin(chan)
        return True

    async def stream(self, text: str) -> AsyncIterator[bytes]:
        chan = await self.channels.checkout(self._pick(text))  # clean: near miss, generator's finally discards or checks in
        done = False
        try:
            async for frame in chan.frames("stream", text):
                yield frame
            done = True
        finally:
            if done:
                await self.channels.checkin(chan)
            else:
                await self.channels.discard(chan)

    def pin(self, session: str, endpoint: str) -> bool:
        if session in self._pinned:
            return True
        chan = self.channels.checkout_nowait(endpoint)  # clean: stored in the table that unpin and shutdown empty
        if chan is None:
            return False
        self._pinned[session] = chan
        return True

    async def unpin(self, session: str) -> None:
        chan = self._pinned.pop(session, None)
        if chan is not None:
            await self.channels.checkin(chan)

    async def shutdown(self) -> None:
        while self._pinned:
            _, chan = self._pinned.popitem()
            await self.channels.discard(chan)

    async def compare(self, text: str, left: str, right: str):
        a = await self.channels.checkout(left)  # leak: not checked in when right has no idle channel
        b = self.channels.checkout_nowait(right)  # clean: None or checked in below
        if b is None:
            return None
        try:
            return await asyncio.gather(a.call("embed", [text]), b.call("embed", [text]))
        finally:
            await self.channels.checkin(a)
            await self.channels.checkin(b)
