"""Async front end that routes requests to engine replicas with bounded concurrency."""
from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, AsyncIterator

logger = logging.getLogger("router")


class EngineBusy(Exception):
    pass


@dataclass
class Replica:
    name: str
    healthy: bool = True
    inflight: int = 0


class ReplicaPool:
    def __init__(self, replicas: list[Replica], max_inflight: int) -> None:
        self._ready: asyncio.Queue[Replica] = asyncio.Queue()
        for r in replicas:
            for _ in range(max_inflight):
                self._ready.put_nowait(r)

    async def lease(self) -> Replica:
        replica = await self._ready.get()
        replica.inflight += 1
        return replica

    def lease_nowait(self) -> Replica:
        if self._ready.empty():
            raise EngineBusy()
        replica = self._ready.get_nowait()
        replica.inflight += 1
        return replica

    def unlease(self, replica: Replica) -> None:
        replica.inflight -= 1
        self._ready.put_nowait(replica)


class Router:
    def __init__(self, pool: ReplicaPool, max_parallel: int = 32) -> None:
        self.pool = pool
        self.gate = asyncio.Semaphore(max_parallel)
        self.sticky: dict[str, Replica] = {}

    async def _call(self, replica: Replica, payload: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"replica": replica.name, "text": payload.get("prompt", "")}

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        replica = await self.pool.lease()  # clean: finally
        try:
            return await self._call(replica, payload)
        finally:
            self.pool.unlease(replica)

    async def generate_checked(self, payload: dict[str, Any]) -> dict[str, Any]:
        replica = await self.pool.lease()  # leak: the unhealthy replica's lease is dropped with the error reply
        if not replica.healthy:
            return {"error": "unavailable"}
        result = await self._call(replica, payload)
        self.pool.unlease(replica)
        return result

    async def generate_healthy(self, payload: dict[str, Any], tries: int = 5) -> dict[str, Any]:
        for _ in range(tries):
            replica = await self.pool.lease()  # clean: near miss, unhealthy ones are returned before the next try
            if not replica.healthy:
                self.pool.unlease(replica)
                await asyncio.sleep(0.05)
                continue
            try:
                return await self._call(replica, payload)
            finally:
                self.pool.unlease(replica)
        raise EngineBusy()

    async def stream(self, payload: dict[str, Any]) -> AsyncIterator[str]:
        replica = await self.pool.lease()  # leak: the stop token returns from the generator without the unlease
        result = await self._call(replica, payload)
        for token in result["text"].split():
            if token == payload.get("stop"):
                return
            yield token
        self.pool.unlease(replica)

    async def stream_until(self, payload: dict[str, Any]) -> AsyncIterator[str]:
        replica = await self.pool.lease()  # clean: near miss, break leads to the unlease after the loop
        result = await self._call(replica, payload)
        tokens = []
        for token in result["text"].split():
            if token == payload.get("stop"):
                break
            tokens.append(token)
        self.pool.unlease(replica)
        for token in tokens:
            yield token

    async def limited(self, payload: dict[str, Any]) -> dict[str, Any]:
        await self.gate.acquire()  # clean: released in the finally
        try:
            return await self.generate(payload)
        finally:
            self.gate.release()

    async def limited_cached(self, payload: dict[str, Any], cache: dict[str, dict]) -> dict[str, Any]:
        await self.gate.acquire()  # leak: a cache hit returns while the semaphore is held
        prompt = payload["prompt"]
        if prompt in cache:
            return cache[prompt]
        cache[prompt] = await self.generate(payload)
        self.gate.release()
        return cache[prompt]

    async def race(self, payload: dict[str, Any]) -> dict[str, Any]:
        first = await self.pool.lease()  # clean: both are returned after the race
        second = await self.pool.lease()  # clean: both are returned after the race
        t1 = asyncio.create_task(self._call(first, payload))
        t2 = asyncio.create_task(self._call(second, payload))
        done, _ = await asyncio.wait({t1, t2})
        for r in (first, second):
            self.pool.unlease(r)
        return next(iter(done)).result()

    async def hedge(self, payload: dict[str, Any]) -> dict[str, Any]:
        main = await self.pool.lease()  # leak: no backup available means an error reply with this one still out
        try:
            backup = self.pool.lease_nowait()  # clean: returned together with the first
        except EngineBusy:
            return {"error": "busy"}
        start = time.monotonic()
        result = await self._call(main, payload)
        if time.monotonic() - start > 1.0:
            result = await self._call(backup, payload)
        self.pool.unlease(backup)
        self.pool.unlease(main)
        return result

    async def open_session(self, session_id: str) -> str:
        if session_id in self.sticky:
            return self.sticky[session_id].name
        replica = await self.pool.lease()  # clean: kept in the sticky table until close_session
        self.sticky[session_id] = replica
        return replica.name

    async def close_session(self, session_id: str) -> None:
        replica = self.sticky.pop(session_id, None)
        if replica is not None:
            self.pool.unlease(replica)

    async def ping(self) -> bool:
        try:
            self.pool.lease_nowait()  # leak: leased only to see whether one is there
        except EngineBusy:
            return False
        return True
