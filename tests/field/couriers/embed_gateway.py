"""Async gateway in front of the embedding backends."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger("embed.gateway")


@dataclass
class Channel:
    host: str
    port: int
    generation: int = 0
    healthy: bool = True
    inflight: int = 0

    async def rpc(self, method: str, payload: dict) -> dict:
        self.inflight += 1
        try:
            await asyncio.sleep(0)
            return {"method": method, "status": "OK", "vectors": payload.get("texts", [])}
        finally:
            self.inflight -= 1


class ChannelPool:
    """Fixed number of channels per backend, handed out one caller at a time."""

    def __init__(self, host: str, port: int, size: int = 8) -> None:
        self._idle: deque[Channel] = deque(Channel(host, port) for _ in range(size))
        self._waiters: deque[asyncio.Future] = deque()
        self._size = size

    async def checkout(self) -> Channel:
        while not self._idle:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        return self._idle.popleft()  # clean: handed to the caller

    def try_checkout(self) -> Channel | None:
        if not self._idle:
            return None
        return self._idle.pop()  # clean: handed to the caller

    def checkin(self, chan: Channel) -> None:
        self._idle.append(chan)
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)
                break


@dataclass
class EmbedRequest:
    request_id: str
    texts: list[str]
    model: str = "base"
    channel: Channel | None = None
    result: list = field(default_factory=list)


class EmbedGateway:
    def __init__(self, primary: ChannelPool, replica: ChannelPool) -> None:
        self.primary = primary
        self.replica = replica
        self.sessions: dict[str, EmbedRequest] = {}

    async def embed(self, texts: list[str]) -> list:
        chan = await self.primary.checkout()  # clean: released in finally
        try:
            reply = await chan.rpc("Embed", {"texts": texts})
            return reply["vectors"]
        finally:
            self.primary.checkin(chan)

    async def embed_with_failover(self, texts: list[str]) -> list:
        chan = await self.primary.checkout()  # leak: rebound to a replica channel when the primary is unhealthy
        owner = self.primary
        if not chan.healthy:
            log.warning("primary unhealthy, using replica")
            chan = await self.replica.checkout()  # clean: owner follows, checked in at the end
            owner = self.replica
        try:
            reply = await chan.rpc("Embed", {"texts": texts})
        finally:
            owner.checkin(chan)
        return reply["vectors"]

    async def embed_hedged(self, texts: list[str]) -> list:
        first = await self.primary.checkout()  # clean: finally gives it back
        second = None
        try:
            reply = await first.rpc("Embed", {"texts": texts})
            if reply["status"] != "OK":
                second = self.replica.try_checkout()  # clean: near miss, released under the None check in finally
                if second is None:
                    return []
                reply = await second.rpc("Embed", {"texts": texts})
            return reply["vectors"]
        finally:
            self.primary.checkin(first)
            if second is not None:
                self.replica.checkin(second)

    async def probe(self) -> bool:
        chan = self.primary.try_checkout()  # leak: the non-OK branch returns without checkin
        if chan is None:
            return True
        reply = await chan.rpc("Health", {})
        if reply["status"] != "OK":
            chan.healthy = False
            return False
        self.primary.checkin(chan)
        return True

    async def open_stream(self, req: EmbedRequest) -> None:
        if req.channel is not None or req.request_id in self.sessions:
            return
        req.channel = await self.primary.checkout()  # clean: near miss, kept on the request and released by close_stream
        self.sessions[req.request_id] = req

    async def feed(self, request_id: str, texts: list[str]) -> int:
        req = self.sessions[request_id]
        reply = await req.channel.rpc("Embed", {"texts": texts})
        req.result.extend(reply["vectors"])
        return len(req.result)

    async def reroute(self, request_id: str) -> None:
        """Move a running stream to another channel of the primary."""
        req = self.sessions.get(request_id)
        if req is None or req.channel is None:
            return
        req.channel.inflight = 0
        req.channel = await self.primary.checkout()  # leak: overwrites the channel the request still holds

    def close_stream(self, request_id: str) -> list:
        req = self.sessions.pop(request_id, None)
        if req is None:
            return []
        if req.channel is not None:
            self.primary.checkin(req.channel)
            req.channel = None
        return req.result


async def warm_up(gateway: EmbedGateway, rounds: int = 3) -> int:
    ok = 0
    for i in range(rounds):
        chan = await gateway.replica.checkout()  # leak: skipped checkin on continue when the reply is empty
        reply = await chan.rpc("Embed", {"texts": ["warm up %d" % i]})
        if not reply["vectors"]:
            continue
        ok += 1
        gateway.replica.checkin(chan)
    return ok
