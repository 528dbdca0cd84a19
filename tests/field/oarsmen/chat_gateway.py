"""Gateway that spreads chat requests over model replicas through persistent framed channels."""
from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import deque
from typing import AsyncIterator, Dict, List, Optional

log = logging.getLogger("gateway")

PROTOCOL = 7


class UpstreamBusy(Exception):
    """No channel became free within the queueing budget."""

class UpstreamError(Exception):
    """The replica could not be reached or hung up on us."""


class Channel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.uses = 0
        self.broken = False

    async def send(self, payload: dict) -> None:
        body = json.dumps(payload).encode()
        self.writer.write(len(body).to_bytes(4, "big") + body)
        await self.writer.drain()
        self.uses += 1

    async def recv(self) -> dict:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return json.loads(await self.reader.readexactly(size))

    def close(self) -> None:
        self.broken = True
        self.writer.close()


class ChannelPool:
    """At most `limit` channels to one replica; each channel that is out holds one permit."""

    def __init__(self, host: str, port: int, limit: int = 16, max_uses: int = 500) -> None:
        self.host, self.port = host, port
        self.max_uses = max_uses
        self._idle: deque = deque()
        self._permits = asyncio.Semaphore(limit)
        self.out = 0

    async def checkout(self, timeout: float = 2.0) -> Channel:
        try:
            await asyncio.wait_for(self._permits.acquire(), timeout)  # leak: the permit stays taken when the dial below fails and UpstreamError is raised
        except asyncio.TimeoutError:
            raise UpstreamBusy(f"{self.host}:{self.port}") from None
        while self._idle:
            ch = self._idle.pop()  # clean: a stale channel is closed before the loop goes on
            if ch.broken or ch.uses >= self.max_uses:
                ch.close()
                continue
            self.out += 1
            return ch
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)  # clean: wrapped into the channel that is returned
        except OSError as exc:
            raise UpstreamError(str(exc)) from exc
        self.out += 1
        return Channel(reader, writer)

    def checkin(self, ch: Channel) -> None:
        self.out -= 1
        if ch.broken:
            ch.close()
        else:
            self._idle.append(ch)
        self._permits.release()

    def shutdown(self) -> None:
        while self._idle:
            self._idle.pop().close()  # clean: closed in the same expression


class Session:
    """A conversation that wants to stay on the replica that holds its prefix."""

    def __init__(self, sid: str, pool: ChannelPool, ch: Channel) -> None:
        self.sid, self.pool, self.ch = sid, pool, ch
        self.dirty = False
        self.last_used = time.monotonic()

    async def ask(self, req: dict) -> dict:
        self.last_used = time.monotonic()
        self.dirty = True
        await self.ch.send(req)
        answer = await self.ch.recv()
        self.dirty = False
        return answer

    def close(self) -> None:
        # a dirty channel has an unread answer in its pipe, nobody may reuse it
        if self.dirty:
            self.ch.close()
            return
        self.pool.checkin(self.ch)


class Gateway:
    def __init__(self, replicas: Dict[str, List[ChannelPool]], shadow: Optional[ChannelPool] = None) -> None:
        self.replicas = replicas
        self.shadow = shadow
        self.sessions: Dict[str, Session] = {}
        self._background: set = set()

    def pick(self, model: str) -> ChannelPool:
        return min(self.replicas[model], key=lambda p: p.out)

    async def complete(self, req: dict) -> dict:
        pool = self.pick(req["model"])
        ch = await pool.checkout()  # clean: checked in by the finally
        try:
            await ch.send(req)
            answer = await ch.recv()
        except ConnectionError as exc:
            ch.broken = True
            raise UpstreamError(str(exc)) from exc
        finally:
            pool.checkin(ch)
        return answer

    async def complete_with_retry(self, req: dict, attempts: int = 3) -> dict:
        last: Optional[Exception] = None
        for n in range(attempts):
            pool = self.pick(req["model"])
            try:
                ch = await pool.checkout(timeout=1.0)  # leak: a ConnectionError is caught below and the next attempt takes another channel
            except UpstreamBusy as exc:
                last = exc
                await asyncio.sleep(0.05 * (n + 1))
                continue
            try:
                await ch.send(req)
                answer = await ch.recv()
            except ConnectionError as exc:
                ch.broken = True
                last = exc
                continue
            pool.checkin(ch)
            return answer
        raise UpstreamError(f"gave up after {attempts} attempts") from last

    async def stream(self, req: dict) -> AsyncIterator[str]:
        pool = self.pick(req["model"])
        ch = await pool.checkout()  # clean: near miss, the generator's finally checks it in, also when the client goes away
        finished = False
        try:
            await ch.send({**req, "stream": True})
            while True:
                part = await ch.recv()
                if part.get("done"):
                    finished = True
                    break
                yield part["text"]
        finally:
            if not finished:
                ch.broken = True
            pool.checkin(ch)

    async def _roundtrip(self, ch: Channel, req: dict) -> dict:
        await ch.send(req)
        return await ch.recv()

    async def hedged(self, req: dict, delay: float = 0.3) -> dict:
        """Ask a second replica when the first one is slow; the slower one is cut off."""
        left, right = random.sample(self.replicas[req["model"]], 2)
        primary = await left.checkout()  # leak: the checkout of the backup raises UpstreamBusy while this one is out
        first = asyncio.create_task(self._roundtrip(primary, req))
        done, _ = await asyncio.wait({first}, timeout=delay)
        if done:
            left.checkin(primary)
            return first.result()
        backup = await right.checkout(timeout=0.2)  # clean: both are checked in by the finally
        second = asyncio.create_task(self._roundtrip(backup, req))
        try:
            done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            primary.broken = first in pending
            backup.broken = second in pending
            return done.pop().result()
        finally:
            left.checkin(primary)
            right.checkin(backup)

    async def open_session(self, sid: str, model: str) -> Session:
        if sid in self.sessions:
            return self.sessions[sid]
        pool = self.pick(model)
        ch = await pool.checkout(timeout=5.0)  # leak: Session.close() of a dirty session closes the socket but never checks in, so the permit is gone
        stale = self.sessions.pop(sid, None)
        if stale is not None:
            stale.close()
        self.sessions[sid] = Session(sid, pool, ch)
        return self.sessions[sid]

    def expire_sessions(self, max_idle: float = 300.0) -> None:
        for sid in [s for s, sess in self.sessions.items() if sess.last_used < time.monotonic() - max_idle]:
            self.sessions.pop(sid).close()

    async def mirror(self, req: dict) -> None:
        """Send a copy of the request to the shadow replica, do not wait for it."""
        if self.shadow is None:
            return
        try:
            ch = await self.shadow.checkout(timeout=0.01)  # clean: near miss, the task that is started here checks it in
        except (UpstreamBusy, UpstreamError):
            return
        task = asyncio.create_task(self._mirror(ch, dict(req)))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _mirror(self, ch: Channel, req: dict) -> None:
        try:
            await self._roundtrip(ch, req)
        except ConnectionError:
            ch.broken = True
        finally:
            self.shadow.checkin(ch)

    async def probe(self, pool: ChannelPool) -> bool:
        ch = await pool.checkout(timeout=1.0)  # leak: the return for a replica with another protocol skips the check-in
        await ch.send({"op": "hello"})
        hello = await ch.recv()
        if hello.get("protocol") != PROTOCOL:
            log.warning("replica %s speaks %s", pool.host, hello.get("protocol"))
            return False
        pool.checkin(ch)
        return True

    async def warm(self, pool: ChannelPool, n: int) -> int:
        held = []
        for _ in range(n):
            try:
                held.append(await pool.checkout(timeout=0.5))  # clean: all that were opened are checked in after the loop
            except (UpstreamBusy, UpstreamError) as exc:
                log.info("warmed only %d: %s", len(held), exc)
                break
        for ch in held:
            pool.checkin(ch)
        return len(held)

    async def close(self) -> None:
        for session in list(self.sessions.values()):
            session.close()
        await asyncio.gather(*self._background, return_exceptions=True)
        for pool in [p for pools in self.replicas.values() for p in pools]:
            pool.shutdown()
