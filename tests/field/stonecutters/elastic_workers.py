"""Elastic membership: seats, ports and store connections for training workers.

The agent runs on asyncio.  A worker needs a seat in the rendezvous, a port for its
communicator and, while it starts, a connection to the key-value store.
"""
from __future__ import annotations

import asyncio
import collections
import dataclasses
import heapq
import logging
import time
from typing import Awaitable, Callable, Dict, List, Optional, Set

log = logging.getLogger("elastic")


class PortRange:
    def __init__(self, first: int, last: int):
        self._idle = list(range(first, last + 1))
        heapq.heapify(self._idle)

    def reserve(self) -> Optional[int]:
        return heapq.heappop(self._idle) if self._idle else None

    def unreserve(self, port: int) -> None:
        heapq.heappush(self._idle, port)


@dataclasses.dataclass
class StoreConn:
    serial: int
    healthy: bool = True

    async def get(self, key: str) -> Optional[str]:
        await asyncio.sleep(0)
        return None

    async def put(self, key: str, value: str) -> bool:
        await asyncio.sleep(0)
        return self.healthy


class StoreConns:
    """A bounded pool of store connections."""

    def __init__(self, size: int):
        self._gate = asyncio.Semaphore(size)
        self._idle = collections.deque(StoreConn(i) for i in range(size))

    async def dial(self) -> StoreConn:
        await self._gate.acquire()  # clean: hang_up() releases the permit with the connection
        return self._idle.popleft()

    def hang_up(self, conn: StoreConn) -> None:
        self._idle.append(conn)
        self._gate.release()

    async def dial_healthy(self) -> Optional[StoreConn]:
        await self._gate.acquire()  # leak: no permit goes back when no healthy connection is found
        for i, conn in enumerate(self._idle):
            if conn.healthy:
                del self._idle[i]
                return conn
        return None


class SeatMap:
    """Ranks handed to workers; the set of empty ones is kept sorted lazily."""

    def __init__(self, world: int):
        self._empty: Set[int] = set(range(world))
        self.generation = 0

    def sit(self) -> int:
        if not self._empty:
            return -1
        rank = min(self._empty)
        self._empty.discard(rank)
        return rank

    def stand(self, rank: int) -> None:
        self._empty.add(rank)


@dataclasses.dataclass
class Worker:
    name: str
    rank: int = -1
    port: Optional[int] = None
    spare: bool = False
    beat: float = 0.0
    task: Optional[asyncio.Task] = None


class ElasticAgent:
    def __init__(self, seats: SeatMap, ports: PortRange, conns: StoreConns, launch: Callable[[Worker], Awaitable[bool]]):
        self.seats = seats
        self.ports = ports
        self.conns = conns
        self.launch = launch
        self.workers: Dict[str, Worker] = {}
        self.spares: List[Worker] = []

    async def join(self, name: str) -> Optional[Worker]:
        rank = self.seats.sit()  # leak: kept when no port is left
        if rank < 0:
            return None
        port = self.ports.reserve()  # clean: unreserved on a failed launch, else held by the worker until leave()
        if port is None:
            log.warning("%s: out of ports", name)
            return None
        worker = Worker(name, rank, port)
        if not await self.launch(worker):
            self.ports.unreserve(port)
            self.seats.stand(rank)
            return None
        self._replace(worker)
        return worker

    def _replace(self, worker: Worker) -> None:
        self.leave(worker.name)
        worker.beat = time.monotonic()
        self.workers[worker.name] = worker

    def leave(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self.seats.stand(worker.rank)
        if worker.port is not None:
            self.ports.unreserve(worker.port)

    async def join_spare(self, name: str) -> Worker:
        """A spare has a port but no seat."""
        worker = Worker(name, spare=True)
        worker.port = self.ports.reserve()  # clean: near miss, rides in spares until promote() or dismiss_spares()
        self.spares.append(worker)
        return worker

    def promote(self) -> Optional[Worker]:
        if not self.spares:
            return None
        rank = self.seats.sit()  # clean: near miss, moved into the worker, which _replace puts in the table
        if rank < 0:
            return None
        worker = self.spares.pop()
        worker.rank, worker.spare = rank, False
        self._replace(worker)
        return worker

    def dismiss_spares(self) -> None:
        while self.spares:
            worker = self.spares.pop()
            if worker.port is not None:
                self.ports.unreserve(worker.port)

    async def announce(self, worker: Worker) -> bool:
        conn = await self.conns.dial()  # leak: a stale generation returns without hanging up
        seen = await conn.get("generation")
        if seen is not None and int(seen) != self.seats.generation:
            return False
        ok = await conn.put(f"worker/{worker.name}", f"{worker.rank}:{worker.port}")
        self.conns.hang_up(conn)
        return ok

    async def fetch_peers(self) -> Dict[int, str]:
        conn = await self.conns.dial()  # clean: hung up in finally
        peers: Dict[int, str] = {}
        try:
            for worker in self.workers.values():
                addr = await conn.get(f"worker/{worker.name}")
                if addr is None:
                    return {}
                peers[worker.rank] = addr
        finally:
            self.conns.hang_up(conn)
        return peers

    async def probe(self, tries: int = 3) -> bool:
        for n in range(tries):
            conn = await self.conns.dial()  # leak: the retry after a timeout dials again without hanging up
            try:
                await asyncio.wait_for(conn.get("ping"), timeout=0.5)
            except asyncio.TimeoutError:
                log.info("probe %d timed out", n)
                continue
            self.conns.hang_up(conn)
            return True
        return False

    async def publish_world(self, retries: int = 3) -> bool:
        conn = await self.conns.dial()  # clean: near miss, hung up before it is replaced and at the end
        for _ in range(retries):
            if await conn.put("world", str(len(self.workers))):
                break
            self.conns.hang_up(conn)
            conn = await self.conns.dial()  # clean: hung up on the next turn or at the end
        else:
            self.conns.hang_up(conn)
            return False
        self.conns.hang_up(conn)
        return True

    def spawn_probe(self, worker: Worker) -> Optional[asyncio.Task]:
        port = self.ports.reserve()  # clean: near miss, the task's done callback unreserves it
        if port is None:
            return None
        task = asyncio.ensure_future(self._probe_port(worker, port))
        task.add_done_callback(lambda _t: self.ports.unreserve(port))
        worker.task = task
        return task

    async def _probe_port(self, worker: Worker, port: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # clean: closed in finally
        try:
            return bool(await reader.read(1))
        finally:
            writer.close()

    async def sweep(self, deadline: float) -> int:
        gone = 0
        now = time.monotonic()
        for name in list(self.workers):
            if now - self.workers[name].beat > deadline:
                self.leave(name)
                gone += 1
        return gone

    async def resize(self, names: List[str]) -> int:
        """Seats newcomers that have no process yet."""
        seated = 0
        for name in names:
            rank = self.seats.sit()  # leak: continue for a known worker keeps the seat
            if rank < 0:
                break
            if name in self.workers:
                continue
            self.workers[name] = Worker(name, rank)
            seated += 1
        self.seats.generation += 1
        return seated
