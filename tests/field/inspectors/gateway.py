"""Async gateway in front of inference replicas: connections, admission, retries."""
import asyncio
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional


class ReplicaDown(Exception):
    pass


@dataclass
class Replica:
    url: str
    in_flight: int = 0
    limit: int = 64
    draining: bool = False

    def begin(self) -> bool:
        if self.in_flight >= self.limit:
            return False
        self.in_flight += 1
        return True

    def end(self) -> None:
        self.in_flight -= 1


class WireCache:
    """Keep-alive connections, each remembered with the time it went idle."""

    def __init__(self, opener, ttl: float) -> None:
        self._opener = opener
        self._ttl = ttl
        self._idle: dict[str, list[tuple[float, object]]] = defaultdict(list)

    async def plug(self, url: str):
        while self._idle[url]:
            parked, wire = self._idle[url].pop()  # leak: an expired connection is neither closed nor kept
            if time.monotonic() - parked < self._ttl:
                return wire
        return await self._opener(url)  # clean: handed to the caller

    def unplug(self, url: str, wire) -> None:
        if wire.broken:
            wire.close()
        else:
            self._idle[url].append((time.monotonic(), wire))


@dataclass
class Gateway:
    replicas: list[Replica]
    wires: WireCache
    doors: asyncio.Semaphore
    sticky: dict[str, object] = field(default_factory=dict)

    def pick(self) -> Optional[Replica]:
        """Power-of-two choice; the winner already counts the request."""
        first, second = random.sample(self.replicas, 2)
        if second.in_flight < first.in_flight:
            first, second = second, first
        for replica in (first, second):
            if replica.begin():  # clean: near miss, a draining replica is ended again
                if not replica.draining:
                    return replica
                replica.end()
        return None

    async def complete(self, body: dict) -> Optional[dict]:
        replica = self.pick()  # clean: ended in finally
        if replica is None:
            return None
        wire = await self.wires.plug(replica.url)  # clean: unplugged in finally
        try:
            return await wire.post("/v1/completions", body)
        finally:
            self.wires.unplug(replica.url, wire)
            replica.end()

    async def complete_retrying(self, body: dict, attempts: int = 3) -> Optional[dict]:
        for attempt in range(attempts):
            replica = self.pick()  # leak: the handled ReplicaDown does not end the count
            if replica is None:
                await asyncio.sleep(0.05 * 2 ** attempt)
                continue
            wire = await self.wires.plug(replica.url)  # clean: near miss, unplugged on success and on error
            try:
                reply = await wire.post("/v1/completions", body)
            except ReplicaDown:
                self.wires.unplug(replica.url, wire)
                continue
            self.wires.unplug(replica.url, wire)
            replica.end()
            return reply
        return None

    async def stream(self, body: dict) -> AsyncIterator[bytes]:
        replica = self.pick()  # clean: near miss, generator's finally also runs on aclose
        if replica is None:
            return
        wire = await self.wires.plug(replica.url)  # clean: unplugged in the generator's finally
        try:
            async for chunk in wire.events("/v1/chat", body):
                if chunk == b"[DONE]":
                    return
                yield chunk
        finally:
            self.wires.unplug(replica.url, wire)
            replica.end()

    async def stick(self, session: str, url: str) -> None:
        if session in self.sticky:
            return
        self.sticky[session] = await self.wires.plug(url)  # clean: unstick() unplugs, aclose() unsticks all

    async def restick(self, session: str, url: str) -> None:
        wire = await self.wires.plug(url)  # leak: unhealthy new connection is abandoned
        if not await wire.ping():
            return
        old = self.sticky.pop(session, None)
        self.sticky[session] = wire
        if old is not None:
            self.wires.unplug(old.url, old)

    async def admit(self, body: dict) -> Optional[dict]:
        await self.doors.acquire()  # leak: an empty prompt returns without release
        if not body.get("prompt"):
            return {"error": "empty prompt"}
        reply = await self.complete(body)
        self.doors.release()
        return reply

    async def admit_or_shed(self, body: dict, patience: float) -> Optional[dict]:
        try:
            await asyncio.wait_for(self.doors.acquire(), patience)  # clean: near miss, timeout holds nothing, else released
        except asyncio.TimeoutError:
            return None
        try:
            return await self.complete_retrying(body)
        finally:
            self.doors.release()

    async def healthy(self, replica: Replica) -> bool:
        wire = await self.wires.plug(replica.url)  # leak: a failed ping returns before unplug
        if not await wire.ping():
            replica.draining = True
            return False
        self.wires.unplug(replica.url, wire)
        return True

    def unstick(self, session: str) -> None:
        wire = self.sticky.pop(session)
        self.wires.unplug(wire.url, wire)

    async def aclose(self) -> None:
        for session in list(self.sticky):
            self.unstick(session)
