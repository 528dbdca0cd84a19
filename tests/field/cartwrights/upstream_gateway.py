"""Asynchronous gateway between HTTP handlers and model replicas.

Every call to a replica goes over a persistent channel.  Channels are kept
in a per-replica pool; in addition each tenant has a number of tickets that
bounds its concurrency.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator, Optional

log = logging.getLogger("gateway")


class UpstreamError(Exception):
    pass


class ChannelClosed(UpstreamError):
    pass


class TenantBusy(Exception):
    pass


class Channel:
    """Framed request/response stream to one replica."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.opened = time.monotonic()
        self.closed = False
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def send(self, msg: dict[str, Any]) -> None:
        if self.closed:
            raise ChannelClosed(self.replica)
        await self._inbox.put(msg)

    async def recv(self) -> dict[str, Any]:
        msg = await self._inbox.get()
        if msg.get("error"):
            raise UpstreamError(msg["error"])
        return msg

    def close(self) -> None:
        self.closed = True


class ChannelPool:
    def __init__(self, replica: str, limit: int = 8, max_age: float = 300.0) -> None:
        self.replica = replica
        self.limit = limit
        self.max_age = max_age
        self.size = 0
        self._idle: deque[Channel] = deque()
        self._wakeup = asyncio.Condition()

    async def lease(self) -> Channel:
        async with self._wakeup:
            while not self._idle and self.size >= self.limit:
                await self._wakeup.wait()
            while self._idle:
                chan = self._idle.popleft()  # clean: an open one is returned, a closed one is gone and size is lowered for it
                if not chan.closed:
                    return chan
                self.size -= 1
            self.size += 1
            return Channel(self.replica)

    def lease_nowait(self) -> Optional[Channel]:
        while self._idle:
            chan = self._idle.pop()  # leak: one that is too old is closed without lowering size, its place is lost for good
            if time.monotonic() - chan.opened > self.max_age:
                chan.close()
                continue
            return chan
        return None

    async def restore(self, chan: Channel) -> None:
        async with self._wakeup:
            self._idle.append(chan)
            self._wakeup.notify()

    async def discard(self, chan: Channel) -> None:
        chan.close()
        async with self._wakeup:
            self.size -= 1
            self._wakeup.notify()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Channel]:
        chan = await self.lease()  # clean: discarded on an upstream error, restored in all other cases
        broken = False
        try:
            yield chan
        except UpstreamError:
            broken = True
            raise
        finally:
            if broken:
                await self.discard(chan)
            else:
                await self.restore(chan)


class TenantTickets:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._out: dict[str, int] = defaultdict(int)

    def punch(self, tenant: str) -> str:
        if self._out[tenant] >= self.per_tenant:
            raise TenantBusy(tenant)
        self._out[tenant] += 1  # clean: the tenant's name is the ticket, and it is returned
        return tenant

    def tear(self, tenant: str) -> None:
        self._out[tenant] -= 1


class Gateway:
    def __init__(self, replicas: list[str], per_tenant: int = 16) -> None:
        self.pools = {name: ChannelPool(name) for name in replicas}
        self.tickets = TenantTickets(per_tenant)
        self._streams: dict[str, tuple[Channel, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def complete(self, tenant: str, replica: str, body: dict[str, Any]) -> dict[str, Any]:
        ticket = self.tickets.punch(tenant)  # clean: the finally tears it
        try:
            async with self.pools[replica].channel() as chan:  # clean: the context manager restores or discards
                await chan.send(body)
                return await chan.recv()
        finally:
            self.tickets.tear(ticket)

    async def complete_with_deadline(
        self, tenant: str, replica: str, body: dict[str, Any], timeout: float
    ) -> Optional[dict[str, Any]]:
        pool = self.pools[replica]
        ticket = self.tickets.punch(tenant)  # clean: torn in the finally, whichever way the body is left
        try:
            chan = await pool.lease()  # leak: on the timeout None is returned and the channel is neither restored nor discarded
            await chan.send(body)
            try:
                reply = await asyncio.wait_for(chan.recv(), timeout)
            except asyncio.TimeoutError:
                log.warning("%s: no reply in %.1fs", replica, timeout)
                return None
            except UpstreamError:
                await pool.discard(chan)
                raise
            await pool.restore(chan)
            return reply
        finally:
            self.tickets.tear(ticket)

    async def hedge(self, tenant: str, first: str, second: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the second replica when the first one reports an error."""
        ticket = self.tickets.punch(tenant)  # leak: the raise when both replicas fail comes without a tear
        for name in (first, second):
            pool = self.pools[name]
            chan = await pool.lease()  # clean: discarded by the handler, restored by the else branch
            try:
                await chan.send(body)
                reply = await chan.recv()
            except UpstreamError as exc:
                log.info("%s failed: %s", name, exc)
                await pool.discard(chan)
            except asyncio.CancelledError:
                await pool.discard(chan)
                self.tickets.tear(ticket)
                raise
            else:
                await pool.restore(chan)
                self.tickets.tear(ticket)
                return reply
        raise UpstreamError(f"{first} and {second} both failed")

    # -- streaming -------------------------------------------------------

    async def open_stream(self, rid: str, tenant: str, replica: str, body: dict[str, Any]) -> None:
        if rid in self._streams:
            raise UpstreamError(f"stream {rid} exists already")
        ticket = self.tickets.punch(tenant)  # clean: torn on a failed send, else kept in the stream table
        chan = await self.pools[replica].lease()  # clean: discarded on a failed send, else kept in the stream table
        try:
            await chan.send(body)
        except ChannelClosed:
            await self.pools[replica].discard(chan)
            self.tickets.tear(ticket)
            raise
        self._streams[rid] = (chan, ticket)

    async def next_chunk(self, rid: str) -> Optional[dict[str, Any]]:
        chan, _ = self._streams[rid]
        try:
            msg = await chan.recv()
        except (UpstreamError, asyncio.CancelledError):
            await self.close_stream(rid, broken=True)
            raise
        if msg.get("done"):
            await self.close_stream(rid)
            return None
        return msg

    async def close_stream(self, rid: str, broken: bool = False) -> None:
        entry = self._streams.pop(rid, None)
        if entry is None:
            return
        chan, ticket = entry
        self.tickets.tear(ticket)
        pool = self.pools[chan.replica]
        await (pool.discard(chan) if broken else pool.restore(chan))

    # -- background ------------------------------------------------------

    async def _probe(self, pool: ChannelPool, chan: Channel) -> None:
        try:
            await chan.send({"op": "ping"})
            await asyncio.wait_for(chan.recv(), 2.0)
        except (UpstreamError, asyncio.TimeoutError):
            await pool.discard(chan)
        else:
            await pool.restore(chan)

    def probe_all(self) -> None:
        for pool in self.pools.values():
            chan = pool.lease_nowait()  # clean: None, or the probe task ends its life in every branch
            if chan is None:
                continue
            task = asyncio.create_task(self._probe(pool, chan))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def drain(self, pool: ChannelPool, seconds: float) -> int:
        """Close idle channels of a replica that is going away."""
        closed = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            chan = pool.lease_nowait()  # leak: cancelled in the sleep, the handler returns with the channel still out
            if chan is None:
                break
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                log.info("%s: drain interrupted", pool.replica)
                return closed
            await pool.discard(chan)
            closed += 1
        return closed
