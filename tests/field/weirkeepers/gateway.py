"""Async front end: worker connections, rate tickets, and streamed answers."""
from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional

log = logging.getLogger("gateway")


class WorkerConn:
    def __init__(self, worker: str, pool: "ConnPool") -> None:
        self.worker = worker
        self.pool = pool
        self.healthy = True

    async def call(self, op: str, body: Dict[str, Any]) -> Dict[str, Any]:
        await asyncio.sleep(0)
        return {"op": op, "ok": self.healthy, "tokens": body.get("tokens", [])}

    async def events(self, body: Dict[str, Any]) -> AsyncIterator[Dict[str, Any]]:
        for token in body.get("tokens", []):
            await asyncio.sleep(0)
            yield {"token": token}


class ConnPool:
    def __init__(self, workers: List[str], each: int) -> None:
        self._idle: Dict[str, List[WorkerConn]] = {}
        for worker in workers:
            self._idle[worker] = [WorkerConn(worker, self) for _ in range(each)]
        self._cond = asyncio.Condition()

    async def get_conn(self, worker: str) -> WorkerConn:
        async with self._cond:
            while not self._idle[worker]:
                await self._cond.wait()
            return self._idle[worker].pop()

    def get_conn_nowait(self, worker: str) -> Optional[WorkerConn]:
        idle = self._idle.get(worker)
        return idle.pop() if idle else None

    async def put_conn(self, conn: WorkerConn) -> None:
        async with self._cond:
            self._idle[conn.worker].append(conn)
            self._cond.notify_all()


class ConnScope:
    """async with ConnScope(pool, worker) as conn: ..."""

    def __init__(self, pool: ConnPool, worker: str) -> None:
        self.pool = pool
        self.worker = worker

    async def __aenter__(self) -> WorkerConn:
        self.conn = await self.pool.get_conn(self.worker)  # clean: __aexit__ puts it back
        return self.conn

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if exc is not None:
            self.conn.healthy = False
        await self.pool.put_conn(self.conn)
        return False


class RateTickets:
    def __init__(self, tokens_in_flight: int) -> None:
        self.left = tokens_in_flight

    def charge(self, tenant: str, tokens: int) -> bool:
        if self.left < tokens:
            log.info("tenant %s over its rate", tenant)
            return False
        self.left -= tokens
        return True

    def credit(self, tokens: int) -> None:
        self.left += tokens


class Gateway:
    def __init__(self, pool: ConnPool, tickets: RateTickets, workers: List[str], concurrency: int) -> None:
        self.pool = pool
        self.tickets = tickets
        self.workers = workers
        self._gate = asyncio.Semaphore(concurrency)
        self._sticky: Dict[str, WorkerConn] = {}
        self._background: set = set()

    def _choose(self) -> str:
        return random.choice(self.workers)

    async def complete(self, tenant: str, body: Dict[str, Any]) -> Dict[str, Any]:
        cost = len(body["tokens"]) + body.get("max_tokens", 16)
        if not self.tickets.charge(tenant, cost):  # leak: an answer that is not ok returns without credit
            return {"error": "rate"}
        async with ConnScope(self.pool, self._choose()) as conn:  # clean: async with
            reply = await conn.call("complete", body)
        if not reply["ok"]:
            return {"error": "worker", "detail": reply["op"]}
        self.tickets.credit(cost)
        return reply

    async def chat(self, tenant: str, body: Dict[str, Any]) -> Dict[str, Any]:
        cost = 2 * len(body["tokens"])
        charged = self.tickets.charge(tenant, cost)  # clean: near miss, credited when charged
        reply: Dict[str, Any] = {"error": "rate"}
        if charged:
            conn = await self.pool.get_conn(self._choose())  # clean: put back before the reply is looked at
            reply = await conn.call("chat", body)
            await self.pool.put_conn(conn)
        if charged:
            self.tickets.credit(cost)
        return reply

    async def stream(self, body: Dict[str, Any]) -> AsyncIterator[str]:
        conn = await self.pool.get_conn(self._choose())  # leak: return at the stop token
        async for event in conn.events(body):
            if event["token"] == body.get("stop"):
                yield "data: [DONE]\n\n"
                return
            yield f"data: {json.dumps(event)}\n\n"
        await self.pool.put_conn(conn)

    async def stream_guarded(self, body: Dict[str, Any]) -> AsyncIterator[str]:
        await self._gate.acquire()  # clean: released in finally
        conn = await self.pool.get_conn(self._choose())  # clean: put back in finally
        try:
            async for event in conn.events(body):
                if event["token"] == body.get("stop"):
                    return
                yield f"data: {json.dumps(event)}\n\n"
        finally:
            await self.pool.put_conn(conn)
            self._gate.release()

    async def gated(self, body: Dict[str, Any]) -> Dict[str, Any]:
        await self._gate.acquire()  # leak: the return for an unhealthy connection skips release
        conn = self.pool.get_conn_nowait(self._choose())  # clean: put back on both ways
        if conn is None:
            self._gate.release()
            return {"error": "busy"}
        if not conn.healthy:
            await self.pool.put_conn(conn)
            return {"error": "unhealthy"}
        reply = await conn.call("gated", body)
        await self.pool.put_conn(conn)
        self._gate.release()
        return reply

    # sessions pinned to one worker ----------------------------------------

    async def open_session(self, session: str) -> str:
        conn = self._sticky.get(session)
        if conn is None:
            fresh = await self.pool.get_conn(self._choose())  # clean: near miss, in _sticky or put back
            conn = self._sticky.setdefault(session, fresh)
            if conn is not fresh:
                await self.pool.put_conn(fresh)
        return conn.worker

    async def close_session(self, session: str) -> None:
        conn = self._sticky.pop(session, None)
        if conn is not None:
            await self.pool.put_conn(conn)

    async def move_session(self, session: str, worker: str) -> bool:
        current = self._sticky.get(session)
        if current is None:
            return False
        target = self.pool.get_conn_nowait(worker)  # leak: return False when the worker did not change
        if target is None or current.worker == worker:
            return False
        self._sticky[session] = target
        await self.pool.put_conn(current)
        return True

    async def ask(self, session: Optional[str], body: Dict[str, Any]) -> Dict[str, Any]:
        own = session is None or session not in self._sticky
        if own:
            conn = await self.pool.get_conn(self._choose())  # clean: near miss, put back when own
        else:
            conn = self._sticky[session]
        reply = await conn.call("ask", body)
        if own:
            await self.pool.put_conn(conn)
        return reply

    async def ask_twice(self, body: Dict[str, Any], keep: bool) -> List[Dict[str, Any]]:
        replies = []
        conn = await self.pool.get_conn(self._choose())  # leak: with keep it is neither stored nor put back
        replies.append(await conn.call("ask", body))
        replies.append(await conn.call("ask", {**body, "retry": True}))
        if not keep:
            await self.pool.put_conn(conn)
        return replies

    # hedging and fan out ---------------------------------------------------

    async def _call_and_put(self, conn: WorkerConn, body: Dict[str, Any]) -> Dict[str, Any]:
        reply = await conn.call("fan", body)
        await self.pool.put_conn(conn)
        return reply

    async def fan_out(self, body: Dict[str, Any]) -> List[Dict[str, Any]]:
        jobs: List[Awaitable[Dict[str, Any]]] = []
        for worker in self.workers:
            conn = self.pool.get_conn_nowait(worker)  # clean: near miss, the job puts it back
            if conn is not None:
                jobs.append(self._call_and_put(conn, body))
        return list(await asyncio.gather(*jobs))

    async def hedge(self, body: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        for attempt, worker in enumerate(self.workers):
            conn = await self.pool.get_conn(worker)  # leak: an unsuccessful worker's connection is rebound
            reply = await conn.call("hedge", body)
            if reply["ok"]:
                await self.pool.put_conn(conn)
                return reply
            log.info("hedge attempt %d on %s", attempt, worker)
        return None
