"""Small RPC layer between the router and the workers: sessions over shared channels."""
from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, Awaitable, Callable, Dict, List, Optional

log = logging.getLogger("rpc")


class Channel:
    def __init__(self, ident: int, send: Callable[[dict], Awaitable[dict]]) -> None:
        self.ident = ident
        self.send = send
        self.broken = False


class ChannelPool:
    def __init__(self, factory: Callable[[int], Channel], limit: int) -> None:
        self._factory = factory
        self._ids = itertools.count()
        self._idle: List[Channel] = []
        self._sem = asyncio.Semaphore(limit)

    async def obtain(self) -> Channel:
        await self._sem.acquire()  # clean: near miss, the permit travels with the channel and dispose releases it
        return self._idle.pop() if self._idle else self._factory(next(self._ids))

    def dispose(self, ch: Channel) -> None:
        if not ch.broken:
            self._idle.append(ch)
        self._sem.release()


class Session:
    def __init__(self, sid: str, ch: Channel, pool: ChannelPool) -> None:
        self.sid = sid
        self._ch: Optional[Channel] = ch
        self._pool = pool
        self.calls = 0

    async def call(self, method: str, **kw: Any) -> dict:
        self.calls += 1
        return await self._ch.send({"sid": self.sid, "m": method, **kw})

    def end(self) -> None:
        ch, self._ch = self._ch, None
        if ch is not None:
            self._pool.dispose(ch)


class SessionScope:
    def __init__(self, client: "RpcClient", sid: str) -> None:
        self.client = client
        self.sid = sid
        self.session: Optional[Session] = None

    async def __aenter__(self) -> Session:
        self.session = await self.client.start(self.sid)  # leak: __aexit__ returns early for a session without calls
        return self.session

    async def __aexit__(self, exc_type: Any, exc: Any, tb: Any) -> None:
        if self.session.calls == 0:
            return
        log.debug("session %s: %d calls", self.sid, self.session.calls)
        self.session.end()


class RpcClient:
    def __init__(self, pool: ChannelPool) -> None:
        self.pool = pool
        self.sessions: Dict[str, Session] = {}

    async def start(self, sid: str) -> Session:
        """The caller ends the session."""
        ch = await self.pool.obtain()  # clean: moved into the session
        return Session(sid, ch, self.pool)

    async def attach(self, sid: str) -> Session:
        s = self.sessions.get(sid)
        if s is None:
            s = await self.start(sid)  # clean: near miss, kept in the table, or ended when another task was faster
            first = self.sessions.setdefault(sid, s)
            if first is not s:
                s.end()
                s = first
        return s

    async def detach(self, sid: str) -> None:
        s = self.sessions.pop(sid, None)
        if s is not None:
            s.end()

    async def rename(self, old: str, new: str) -> bool:
        """Move a session to a new name, opening a fresh one where there was none."""
        s = self.sessions.pop(old, None)
        if s is None:
            s = await self.start(new)  # leak: a taken name returns False and the fresh session is not ended
            if new in self.sessions:
                return False
        elif new in self.sessions:
            s.end()
            return False
        self.sessions[new] = s
        return True

    async def ping(self) -> bool:
        ch = await self.pool.obtain()  # leak: a refused connection is caught and False returned without dispose
        try:
            reply = await ch.send({"m": "ping"})
        except ConnectionError:
            ch.broken = True
            return False
        self.pool.dispose(ch)
        return bool(reply.get("ok"))

    async def call_once(self, method: str, tries: int = 3, **kw: Any) -> Optional[dict]:
        for n in range(tries):
            s = await self.start(f"once-{n}")  # clean: near miss, the finally ends it before the next try
            try:
                return await s.call(method, **kw)
            except ConnectionError:
                log.info("%s: try %d failed", method, n)
            finally:
                s.end()
        return None

    async def fire(self, method: str, on_done: Callable[[dict], None]) -> asyncio.Task:
        s = await self.start("fire")  # clean: near miss, the done callback of the task ends it
        task = asyncio.ensure_future(s.call(method))

        def finished(t: asyncio.Task) -> None:
            s.end()
            if not t.cancelled() and t.exception() is None:
                on_done(t.result())

        task.add_done_callback(finished)
        return task

    async def poll(self, method: str, interval: float) -> dict:
        while True:
            s = await self.start("poll")  # leak: the `continue` for a busy worker goes past end()
            reply = await s.call(method)
            if reply.get("busy"):
                await asyncio.sleep(interval)
                continue
            s.end()
            return reply

    async def version(self, sid: str) -> int:
        async with SessionScope(self, sid) as s:  # clean: near miss, this user always makes a call, so the scope ends it
            reply = await s.call("version")
        return int(reply.get("version", 0))
