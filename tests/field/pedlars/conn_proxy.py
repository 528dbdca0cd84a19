"""TCP proxy: a connection table of fixed size, upstream connection pools and relay buffers (asyncio)."""
import asyncio
import logging
import time
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional, Set, Tuple
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

Address = Tuple[str, int]


class ConnTable:
    """Slots by index, so that a connection id fits in sixteen bits."""

    def __init__(self, size: int) -> None:
        self._vacant: List[int] = list(range(size - 1, -1, -1))
        self._peer: List[Optional[Address]] = [None] * size

    def occupy(self, peer: Address) -> int:
        """Index of the slot, or -1 when the table is full."""
        if not self._vacant:
            return -1
        slot = self._vacant.pop()
        self._peer[slot] = peer
        return slot

    def vacate(self, slot: int) -> None:
        self._peer[slot] = None
        self._vacant.append(slot)

    def peer_of(self, slot: int) -> Optional[Address]:
        return self._peer[slot]


class Upstream:
    def __init__(self, addr: Address, serial: int) -> None:
        self.addr = addr
        self.serial = serial
        self.healthy = True
        self.last_used = time.monotonic()

    async def exchange(self, data: bytes) -> bytes:
        await asyncio.sleep(0)
        self.last_used = time.monotonic()
        return data


class UpstreamPool:
    def __init__(self, addr: Address, limit: int) -> None:
        self.addr = addr
        self._limit = limit
        self._idle: List[Upstream] = []
        self._made = 0
        self._cond = asyncio.Condition()

    async def borrow(self) -> Upstream:
        async with self._cond:
            while not self._idle and self._made >= self._limit:
                await self._cond.wait()
            if self._idle:
                return self._idle.pop()
            self._made += 1
            return Upstream(self.addr, self._made)

    async def restore(self, up: Upstream) -> None:
        async with self._cond:
            self._idle.append(up)
            self._cond.notify()

    async def discard(self, up: Upstream) -> None:
        """Ends a lease whose connection is broken."""
        async with self._cond:
            up.healthy = False
            self._made -= 1
            self._cond.notify()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Upstream]:
        up = await self.borrow()  # clean: restored or discarded when the block ends
        try:
            yield up
        finally:
            if up.healthy:
                await self.restore(up)
            else:
                await self.discard(up)


class Session:
    def __init__(self, slot: int, up: Upstream, pool: UpstreamPool) -> None:
        self.slot = slot
        self.up = up
        self.pool = pool
        self.bytes_in = 0


class Proxy:
    def __init__(self, table: ConnTable, pools: Dict[str, UpstreamPool], inflight: int) -> None:
        self.table = table
        self.pools = pools
        self.gate = asyncio.Semaphore(inflight)
        self.sessions: Dict[int, Session] = {}
        self.jobs: Set[asyncio.Task] = set()
        self.refused = 0

    async def accept(self, peer: Address, route: str) -> Optional[Session]:
        slot = self.table.occupy(peer)  # leak: kept when the route is unknown
        if slot < 0:
            self.refused += 1
            return None
        pool = self.pools.get(route)
        if pool is None:
            logger.warning("no route %s for %s", route, peer)
            return None
        up = await pool.borrow()  # clean: near miss, given back by close_session()
        session = Session(slot, up, pool)
        self.sessions[slot] = session
        return session

    async def close_session(self, slot: int) -> None:
        session = self.sessions.pop(slot, None)
        if session is None:
            return
        await session.pool.restore(session.up)
        self.table.vacate(session.slot)

    async def probe(self, route: str) -> bool:
        pool = self.pools[route]
        up = await pool.borrow()  # clean: restored or discarded by the reply
        reply = await up.exchange(b"ping")
        if reply != b"ping":
            await pool.discard(up)
            return False
        await pool.restore(up)
        return True

    async def probe_all(self) -> Dict[str, bool]:
        state: Dict[str, bool] = {}
        for route, pool in self.pools.items():
            up = await pool.borrow()  # leak: continue for an unhealthy one gives nothing back
            reply = await up.exchange(b"ping")
            if reply != b"ping":
                state[route] = False
                continue
            state[route] = True
            await pool.restore(up)
        return state

    async def one_shot(self, route: str, data: bytes) -> bytes:
        async with self.pools[route].lend() as up:  # clean: async with
            reply = await up.exchange(data)
            if not reply:
                up.healthy = False
                return b""
            return reply

    async def with_retry(self, route: str, data: bytes, tries: int = 3) -> bytes:
        pool = self.pools[route]
        for attempt in range(tries):
            up = await pool.borrow()  # leak: an empty reply goes round without giving it back
            reply = await up.exchange(data)
            if reply:
                await pool.restore(up)
                return reply
            await asyncio.sleep(0.05 * attempt)
        return b""

    async def with_failover(self, routes: List[str], data: bytes) -> bytes:
        for route in routes:
            pool = self.pools[route]
            up = await pool.borrow()  # clean: near miss, discarded before the next route
            reply = await up.exchange(data)
            if not reply:
                await pool.discard(up)
                continue
            await pool.restore(up)
            return reply
        return b""

    async def throttled(self, route: str, data: bytes) -> Optional[bytes]:
        await self.gate.acquire()  # leak: the return for an unknown route keeps the permit
        pool = self.pools.get(route)
        if pool is None:
            return None
        async with pool.lend() as up:  # clean: async with
            reply = await up.exchange(data)
        self.gate.release()
        return reply

    def fire_and_forget(self, slot: int, data: bytes) -> None:
        task = asyncio.ensure_future(self._relay(slot, data))
        self.jobs.add(task)
        task.add_done_callback(self.jobs.discard)

    async def _relay(self, slot: int, data: bytes) -> int:
        session = self.sessions.get(slot)
        if session is None:
            return 0
        await self.gate.acquire()  # clean: released in finally
        try:
            reply = await session.up.exchange(data)
            session.bytes_in += len(reply)
            return len(reply)
        finally:
            self.gate.release()

    async def _notify(self, up: Upstream, done: Callable[[Upstream], Awaitable[None]]) -> None:
        await up.exchange(b"bye")
        await done(up)

    async def farewell(self, route: str) -> None:
        pool = self.pools[route]
        up = await pool.borrow()  # clean: near miss, the notifier awaits pool.restore
        await self._notify(up, pool.restore)

    async def switch(self, slot: int, route: str) -> bool:
        """Moves a live session to another upstream."""
        session = self.sessions.get(slot)
        pool = self.pools.get(route)
        if session is None or pool is None:
            return False
        fresh = await pool.borrow()  # clean: put in the session, whose old one is restored
        await session.pool.restore(session.up)
        session.up, session.pool = fresh, pool
        return True

    async def age_of_oldest(self, route: str, sample: int) -> float:
        pool = self.pools[route]
        taken = [await pool.borrow() for _ in range(sample)]  # leak: only the oldest is restored
        oldest = min(taken, key=lambda u: u.last_used)
        age = time.monotonic() - oldest.last_used
        await pool.restore(oldest)
        return age

    async def warm_up(self, route: str, count: int) -> int:
        pool = self.pools[route]
        taken = [await pool.borrow() for _ in range(count)]  # clean: all restored below
        await asyncio.gather(*(u.exchange(b"hello") for u in taken))
        for u in taken:
            await pool.restore(u)
        return len(taken)

    async def shutdown(self) -> None:
        for slot in list(self.sessions):
            await self.close_session(slot)
        for task in list(self.jobs):
            task.cancel()


class HalfOpen:
    """Sockets seen with SYN only; a slot is reserved until the handshake ends."""

    def __init__(self, table: ConnTable) -> None:
        self.table = table
        self.pending: Dict[Address, Tuple[int, float]] = {}

    def syn(self, peer: Address) -> bool:
        if peer in self.pending:
            return True
        slot = self.table.occupy(peer)  # leak: reap() forgets the slot of an old handshake
        if slot < 0:
            return False
        self.pending[peer] = (slot, time.monotonic())
        return True

    def reset(self, peer: Address) -> None:
        slot, _ = self.pending.pop(peer, (-1, 0.0))
        if slot >= 0:
            self.table.vacate(slot)

    def reap(self, max_age: float) -> int:
        floor = time.monotonic() - max_age
        before = len(self.pending)
        self.pending = {p: e for p, e in self.pending.items() if e[1] >= floor}
        return before - len(self.pending)
