"""Router in front of several replicas: credits per replica, ports, affinity."""
from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

log = logging.getLogger("router")


class Saturated(Exception):
    """All replicas are at their limit."""


@dataclass
class Replica:
    name: str
    capacity: int
    credits_out: int = 0
    healthy: bool = True

    def inc_inflight(self) -> bool:
        if self.credits_out >= self.capacity:
            return False
        self.credits_out += 1
        return True

    def dec_inflight(self) -> None:
        self.credits_out -= 1

    async def post(self, body: str) -> Tuple[int, str]:
        await asyncio.sleep(0)
        return (200, body[::-1]) if self.healthy else (503, "")


@dataclass
class PortAllocator:
    base: int = 20000
    count: int = 64
    _used: set = field(default_factory=set)

    def lease_port(self) -> int:
        for p in range(self.base, self.base + self.count):
            if p not in self._used:
                self._used.add(p)
                return p
        raise Saturated("ports")

    def end_lease(self, p: int) -> None:
        self._used.discard(p)


class Router:
    def __init__(self, replicas: List[Replica], ports: PortAllocator) -> None:
        self.replicas = replicas
        self.ports = ports
        self.affinity: Dict[str, Replica] = {}
        self.mirrors: Dict[str, int] = {}
        self.slow_lane = asyncio.Semaphore(2)
        self.control_port: Optional[int] = None

    def pick(self) -> Replica:
        for r in random.sample(self.replicas, len(self.replicas)):
            if r.healthy and r.inc_inflight():  # clean: the caller gets the replica with the count
                return r
        raise Saturated

    def pick_least(self) -> Replica:
        for r in sorted(self.replicas, key=lambda r: r.credits_out):
            if not r.inc_inflight():  # leak: the unhealthy one is passed over with its count raised
                continue
            if not r.healthy:
                continue
            return r
        raise Saturated

    async def route(self, body: str) -> str:
        r = self.pick()  # clean: counted down in the finally
        try:
            code, text = await r.post(body)
            return text if code == 200 else ""
        finally:
            r.dec_inflight()

    async def route_least(self, body: str) -> Optional[str]:
        r = self.pick_least()  # leak: any code but 200 returns before the count goes down
        code, text = await r.post(body)
        if code != 200:
            log.warning("%s answered %d", r.name, code)
            return None
        r.dec_inflight()
        return text

    async def route_retry(self, body: str, tries: int) -> Optional[str]:
        for _ in range(tries):
            try:
                r = self.pick()  # clean: near miss, counted down before either way on
            except Saturated:
                await asyncio.sleep(0.01)
                continue
            code, text = await r.post(body)
            r.dec_inflight()
            if code == 200:
                return text
        return None

    async def route_failover(self, body: str) -> str:
        r = self.pick()  # leak: after a failure the name goes to the second replica, the first count stays
        code, text = await r.post(body)
        if code != 200:
            r = self.pick()  # clean: counted down below
            code, text = await r.post(body)
        r.dec_inflight()
        return text

    async def route_failover_ok(self, body: str) -> str:
        r = self.pick()  # clean: near miss, counted down before the name is used again
        code, text = await r.post(body)
        if code != 200:
            r.dec_inflight()
            r = self.pick()  # clean: counted down below
            code, text = await r.post(body)
        r.dec_inflight()
        return text

    async def route_long(self, body: str) -> str:
        await self.slow_lane.acquire()  # clean: near miss, each of the two exits releases
        if len(body) < 1000:
            self.slow_lane.release()
            return await self.route(body)
        text = await self.route(body)
        self.slow_lane.release()
        return text

    async def route_priority(self, body: str, urgent: bool) -> str:
        if not urgent:
            await self.slow_lane.acquire()  # clean: near miss, acquired and released under the same flag
        text = await self.route(body)
        if not urgent:
            self.slow_lane.release()
        return text

    async def route_bulk(self, bodies: List[str]) -> List[str]:
        out: List[str] = []
        for b in bodies:
            await self.slow_lane.acquire()  # leak: the empty body goes on without a release
            if not b:
                out.append("")
                continue
            out.append(await self.route(b))
            self.slow_lane.release()
        return out

    def mirror(self, name: str) -> int:
        if name in self.mirrors:
            return self.mirrors[name]
        self.mirrors[name] = self.ports.lease_port()  # clean: in the table until unmirror
        return self.mirrors[name]

    def unmirror(self, name: str) -> None:
        if name in self.mirrors:
            self.ports.end_lease(self.mirrors.pop(name))

    def start_control(self, want: Optional[int]) -> int:
        port = self.ports.lease_port()  # leak: when another port is wanted the leased one is forgotten
        if want is not None and want != port:
            self.control_port = None
            return want
        if self.control_port is not None:
            self.ports.end_lease(self.control_port)
        self.control_port = port
        return port

    def stop(self) -> None:
        for name in list(self.mirrors):
            self.unmirror(name)
        if self.control_port is not None:
            self.ports.end_lease(self.control_port)
            self.control_port = None
