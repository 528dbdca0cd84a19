"""Leases of connections to upstream servers."""
import asyncio
import logging
from typing import Awaitable, Callable, Optional

log = logging.getLogger("gateway.leases")


class ConnectError(Exception):
    pass


class NoUpstream(Exception):
    pass


class Lease:
    def __init__(self, pool: "UpstreamPool", conn):
        self.pool = pool
        self.conn = conn

    def release(self, reuse: bool = True) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            self.pool._take_back(conn, reuse)


class UpstreamPool:
    def __init__(self, url: str, connect: Callable[[str], Awaitable], limit: int = 64):
        self.url = url
        self._connect = connect
        self._sem = asyncio.Semaphore(limit)
        self._idle: list = []
        self.leased = 0
        self.healthy = True

    async def lease(self) -> Lease:
        await self._sem.acquire()  # clean: near miss, released when connecting fails, else by the release of the lease
        try:
            conn = self._idle.pop() if self._idle else await self._connect(self.url)  # clean: returned to the caller inside the lease
        except BaseException:
            self._sem.release()
            raise
        self.leased += 1
        return Lease(self, conn)

    def _take_back(self, conn, reuse: bool) -> None:
        self.leased -= 1
        if reuse and self.healthy:
            self._idle.append(conn)
        else:
            conn.close()
        self._sem.release()

    async def probe(self) -> bool:
        """Looks with a connection of its own whether the server answers."""
        try:
            conn = await self._connect(self.url)  # leak: a server that answers but isn't ready returns without closing it
        except ConnectError:
            self.healthy = False
            return False
        status = await conn.get("/health")
        if status != 200:
            self.healthy = False
            return False
        conn.close()
        self.healthy = True
        return True

    async def prime(self, count: int) -> int:
        leases = []
        try:
            for _ in range(count):
                leases.append(await self.lease())  # clean: the finally releases all, also when one cannot connect
        except ConnectError as exc:
            log.info("%s primed with %d: %s", self.url, len(leases), exc)
        finally:
            for lease in leases:
                lease.release()
        return len(leases)

    def close(self) -> None:
        self.healthy = False
        for conn in self._idle:
            conn.close()
        self._idle.clear()


class Balancer:
    def __init__(self, pools: list[UpstreamPool]):
        self.pools = pools

    def _ranked(self, exclude: Optional[UpstreamPool]) -> list[UpstreamPool]:
        return sorted((p for p in self.pools if p.healthy and p is not exclude), key=lambda p: p.leased)

    async def lease(self, exclude: Optional[UpstreamPool] = None) -> Lease:
        for pool in self._ranked(exclude):
            try:
                return await pool.lease()  # clean: returned to the caller
            except ConnectError:
                pool.healthy = False
        raise NoUpstream()
