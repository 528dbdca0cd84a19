"""Retries, hedging and sessions on top of the fleet."""
from __future__ import annotations

import asyncio
import logging
from typing import Any, Callable, Dict, List, Optional

from .conns import Conn, ConnPool, Fleet

log = logging.getLogger("router")


class Session:
    """A multi-turn conversation that stays on one replica for its KV cache."""

    def __init__(self, fleet: Fleet, conn: Conn) -> None:
        self.fleet = fleet
        self.conn: Optional[Conn] = conn
        self.turns = 0

    async def turn(self, payload: Any) -> Optional[Any]:
        self.turns += 1
        return await self.conn.call("turn", payload)

    def end(self) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            self.fleet.put_back(conn)


class RecordedSession(Session):
    """Also keeps a second connection for the transcript store."""

    def __init__(self, fleet: Fleet, conn: Conn, sink: ConnPool) -> None:
        super().__init__(fleet, conn)
        self.sink = sink
        self.tape = sink.try_take()  # clean: end() puts it back into the sink's pool

    def end(self) -> None:
        if self.tape is not None:
            self.sink.put_back(self.tape)
            self.tape = None
        super().end()


class AuditedSession(Session):
    def __init__(self, fleet: Fleet, conn: Conn, sink: ConnPool) -> None:
        super().__init__(fleet, conn)
        self.sink = sink
        self.audit = sink.try_take()  # leak: no end() here puts the audit one back
        self.lines: List[str] = []

    async def turn(self, payload: Any) -> Optional[Any]:
        self.lines.append(str(payload))
        if self.audit is not None:
            await self.audit.call("audit", payload)
        return await super().turn(payload)


class Dispatcher:
    def __init__(self, fleet: Fleet, retries: int = 2) -> None:
        self.fleet = fleet
        self.retries = retries
        self.sessions: Dict[str, Session] = {}
        self._background: List[asyncio.Task] = []

    async def call(self, payload: Any) -> Optional[Any]:
        """Retries on another replica when the first is broken."""
        avoid: Optional[str] = None
        for _ in range(self.retries + 1):
            conn = self.fleet.take_any(avoid)  # leak: not put back when there is no answer
            if conn is None:
                break
            answer = await conn.call("generate", payload)
            if answer is None:
                conn.broken = True
                avoid = conn.replica
                continue
            self.fleet.put_back(conn)
            return answer
        return None

    async def call_idempotent(self, payload: Any) -> Optional[Any]:
        avoid: Optional[str] = None
        answer: Optional[Any] = None
        attempt = 0
        while answer is None and attempt <= self.retries:
            attempt += 1
            conn = self.fleet.take_any(avoid)  # clean: near miss, put back before each retry
            if conn is None:
                continue
            answer = await conn.call("embed", payload)
            conn.broken = answer is None
            avoid = conn.replica
            self.fleet.put_back(conn)
        return answer

    async def hedge(self, payload: Any) -> Optional[Any]:
        first = self.fleet.take_any()  # clean: put back after the wait, on both ways
        if first is None:
            return None
        second = self.fleet.take_any(avoid=first.replica)  # clean: near miss, put back when it was there
        calls = [c.call("generate", payload) for c in (first, second) if c is not None]
        answers = await asyncio.gather(*calls)
        self.fleet.put_back(first)
        if second is not None:
            self.fleet.put_back(second)
        return next((a for a in answers if a is not None), None)

    async def race(self, payload: Any) -> Optional[Any]:
        first = self.fleet.take_any()  # clean: put back by whichever branch is taken
        if first is None:
            return None
        second = self.fleet.take_any(avoid=first.replica)  # leak: put back only if the first has no answer
        answer = await first.call("generate", payload)
        self.fleet.put_back(first)
        if answer is not None:
            return answer
        if second is None:
            return None
        answer = await second.call("generate", payload)
        self.fleet.put_back(second)
        return answer

    # -- sessions --------------------------------------------------------------------------------

    def begin(self, sid: str) -> bool:
        if sid in self.sessions:
            return True
        conn = self.fleet.take_any()  # clean: the session has it, finish() ends the session
        if conn is None:
            return False
        self.sessions[sid] = Session(self.fleet, conn)
        return True

    def finish(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is not None:
            session.end()

    def migrate(self, sid: str) -> bool:
        session = self.sessions[sid]
        conn = self.fleet.take_any(avoid=session.conn.replica)  # clean: swapped in, the former put back
        if conn is None:
            return False
        session.conn, conn = conn, session.conn
        self.fleet.put_back(conn)
        return True

    def sweep(self, idle: Callable[[Session], bool]) -> int:
        before = len(self.sessions)
        for sid in [s for s, session in self.sessions.items() if idle(session)]:
            self.finish(sid)
        return before - len(self.sessions)

    # -- maintenance -----------------------------------------------------------------------------

    async def oldest_version(self) -> Optional[Any]:
        conn = self.fleet.take_oldest()  # leak: hung up, but its place in the pool is not given back
        if conn is None:
            return None
        answer = await conn.call("version", None)
        await conn.hangup()
        return answer

    async def broadcast(self, method: str, replicas: List[str]) -> int:
        conns: List[Conn] = []
        for name in replicas:
            pool = self.fleet.pools.get(name)
            if pool is None:
                continue
            conn = pool.try_take()  # clean: near miss, the collected ones are put back together
            if conn is not None:
                conns.append(conn)
        answers = await asyncio.gather(*(c.call(method, None) for c in conns))
        for conn in conns:
            self.fleet.put_back(conn)
        return sum(a is not None for a in answers)

    async def reload(self, replicas: List[str]) -> List[str]:
        """Asks every replica to reload its weights; stops at the first that refuses."""
        done: List[str] = []
        pools = self.fleet.pools
        conns = {name: pools[name].try_take() for name in replicas}  # leak: a refusal keeps the rest out
        for name, conn in conns.items():
            if conn is None:
                continue
            answer = await conn.call("reload", None)
            self.fleet.put_back(conn)
            if answer is None:
                return done
            done.append(name)
        return done

    def fire_and_forget(self, payload: Any) -> bool:
        conn = self.fleet.take_any()  # clean: near miss, the task puts it back
        if conn is None:
            return False
        self._background.append(asyncio.create_task(self._deliver(conn, payload)))
        return True

    async def _deliver(self, conn: Conn, payload: Any) -> None:
        try:
            await conn.call("log", payload)
        finally:
            self.fleet.put_back(conn)
