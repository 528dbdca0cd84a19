"""Upstream channels of the inference gateway.

Each model has one ChannelPool; the gateway multiplexes HTTP requests of its
clients onto a bounded number of framed TCP channels per model server.
"""
from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import deque
from typing import Any, AsyncIterator

log = logging.getLogger("gateway.upstream")

PROTO = "frames/3"
Frame = dict[str, Any]


class UpstreamError(Exception):
    """The model server could not be used."""


class PoolClosed(UpstreamError):
    """checkout() after aclose()."""


class Channel:
    """One framed connection to a model server."""

    def __init__(self, endpoint: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.endpoint = endpoint
        self._reader = reader
        self._writer = writer
        self.last_used = time.monotonic()

    @classmethod
    async def dial(cls, endpoint: str) -> "Channel":
        host, _, port = endpoint.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))  # leak: a hello with another protocol raises and the writer is never closed
        chan = cls(endpoint, reader, writer)
        hello = await chan.read_frame()
        if hello.get("proto") != PROTO:
            raise UpstreamError(f"{endpoint} speaks {hello.get('proto')!r}, wanted {PROTO!r}")
        return chan

    def idle_for(self) -> float:
        return time.monotonic() - self.last_used

    async def read_frame(self) -> Frame:
        head = await self._reader.readexactly(4)
        body = await self._reader.readexactly(int.from_bytes(head, "big"))
        return json.loads(body)

    async def send(self, frame: Frame) -> None:
        body = json.dumps(frame).encode()
        self._writer.write(len(body).to_bytes(4, "big") + body)
        await self._writer.drain()

    async def request(self, frame: Frame) -> Frame:
        await self.send(frame)
        reply = await self.read_frame()
        if "error" in reply:
            raise UpstreamError(reply["error"])
        return reply

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            log.debug("close of %s was noisy", self.endpoint)


class ChannelPool:
    def __init__(self, endpoint: str, limit: int = 16, max_idle: float = 30.0) -> None:
        self.endpoint = endpoint
        self.max_idle = max_idle
        self._permits = asyncio.Semaphore(limit)
        self._idle: deque[Channel] = deque()
        self._busy: set[Channel] = set()
        self._closed = False

    async def checkout(self) -> Channel:
        if self._closed:
            raise PoolClosed(self.endpoint)
        await self._permits.acquire()  # clean: near miss, travels with the channel and is released by checkin or by the two error paths
        if self._closed:
            self._permits.release()
            raise PoolClosed(self.endpoint)
        while self._idle:
            chan = self._idle.pop()  # clean: a stale one is closed, a fresh one goes to the caller
            if chan.idle_for() > self.max_idle:
                await chan.close()
                continue
            self._busy.add(chan)
            return chan
        try:
            chan = await Channel.dial(self.endpoint)  # clean: handed to the caller
        except (OSError, UpstreamError) as exc:
            self._permits.release()
            raise UpstreamError(f"dial {self.endpoint}: {exc}") from exc
        self._busy.add(chan)
        return chan

    async def checkin(self, chan: Channel, broken: bool = False) -> None:
        self._busy.discard(chan)
        try:
            if broken or self._closed:
                await chan.close()
            else:
                chan.last_used = time.monotonic()
                self._idle.append(chan)
        finally:
            self._permits.release()

    async def probe(self) -> int:
        """Ping the idle channels; called by the gateway every few seconds."""
        alive = 0
        for _ in range(len(self._idle)):
            if not self._idle:
                break
            chan = self._idle.popleft()  # leak: a draining server's channel is skipped, neither closed nor put back
            try:
                pong = await chan.request({"op": "ping"})
            except UpstreamError as exc:
                log.info("ping %s failed: %s", self.endpoint, exc)
                await chan.close()
                continue
            if pong.get("draining"):
                log.info("%s is draining, no longer used", self.endpoint)
                continue
            chan.last_used = time.monotonic()
            self._idle.append(chan)
            alive += 1
        return alive

    async def aclose(self) -> None:
        self._closed = True
        while self._idle:
            chan = self._idle.popleft()  # clean: closed at once
            await chan.close()


class Gateway:
    def __init__(self, pools: dict[str, ChannelPool]) -> None:
        self._pools = pools
        self._sessions: dict[str, tuple[ChannelPool, Channel]] = {}
        self.served = 0

    async def unary(self, model: str, payload: Frame) -> Frame:
        pool = self._pools[model]
        chan = await pool.checkout()  # clean: checked in by the finally, broken or not
        broken = True
        try:
            reply = await chan.request(payload)
            broken = False
            self.served += 1
            return reply
        finally:
            await pool.checkin(chan, broken=broken)

    async def patient(self, model: str, payload: Frame, attempts: int = 4) -> Frame:
        """Like unary, but waits and tries again when the server is busy."""
        pool = self._pools[model]
        for attempt in range(attempts):
            chan = await pool.checkout()  # leak: a busy reply continues the loop with the channel still out
            try:
                reply = await chan.request(payload)
            except UpstreamError as exc:
                log.warning("attempt %d on %s: %s", attempt, model, exc)
                await pool.checkin(chan, broken=True)
                await asyncio.sleep(2**attempt * 0.1)
                continue
            if reply.get("status") == "busy":
                await asyncio.sleep(reply.get("retry_after", 0.5) * random.uniform(0.8, 1.2))
                continue
            await pool.checkin(chan)
            return reply
        raise UpstreamError(f"{model}: gave up after {attempts} attempts")

    async def hedged(self, model: str, fallback: str, payload: Frame) -> Frame:
        """Ask two servers, take the first answer."""
        first_pool, second_pool = self._pools[model], self._pools[fallback]
        first = await first_pool.checkout()  # leak: the second checkout raises UpstreamError before the try is entered
        second = await second_pool.checkout()  # clean: checked in by the finally
        asks = [asyncio.create_task(c.request(payload)) for c in (first, second)]
        try:
            done, pending = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            return done.pop().result()
        finally:
            await first_pool.checkin(first, broken=not asks[0].done())
            await second_pool.checkin(second, broken=not asks[1].done())

    async def stream(self, model: str, payload: Frame) -> AsyncIterator[str]:
        pool = self._pools[model]
        chan = await pool.checkout()  # clean: checked in when the generator ends or is closed
        drained = False
        try:
            await chan.send({**payload, "stream": True})
            while True:
                frame = await chan.read_frame()
                if frame.get("done"):
                    drained = True
                    return
                yield frame["text"]
        finally:
            # a half read stream cannot be used by the next caller
            await pool.checkin(chan, broken=not drained)

    async def warm(self, model: str, n: int) -> None:
        pool = self._pools[model]
        held: list[Channel] = []
        try:
            for _ in range(n):
                held.append(await pool.checkout())  # clean: near miss, the list is checked in by the finally, also when a later checkout fails
        except UpstreamError as exc:
            log.warning("warm-up of %s stopped at %d: %s", model, len(held), exc)
        finally:
            for chan in held:
                await pool.checkin(chan)

    async def open_session(self, sid: str, model: str) -> None:
        """Pin a channel to a session, the server keeps its KV cache."""
        pool = self._pools[model]
        chan = await pool.checkout()  # leak: a client that opens the same sid twice overwrites the first pair
        self._sessions[sid] = (pool, chan)

    async def say(self, sid: str, text: str) -> str:
        _, chan = self._sessions[sid]
        reply = await chan.request({"op": "say", "text": text})
        return reply["text"]

    async def close_session(self, sid: str) -> None:
        entry = self._sessions.pop(sid, None)
        if entry is not None:
            pool, chan = entry
            await pool.checkin(chan)

    async def shutdown(self) -> None:
        for sid in list(self._sessions):
            await self.close_session(sid)
        for pool in self._pools.values():
            await pool.aclose()
