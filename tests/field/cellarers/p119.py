"""Asyncio pool of upstream connections; waiters stand in line as futures."""
import asyncio
from collections import deque


class UpstreamPool:
    def __init__(self, connect, cap):
        self._connect = connect
        self._room = cap
        self._idle = []
        self._waiters = deque()

    async def borrow(self):
        if self._idle:
            return self._idle.pop()
        if self._room > 0:
            self._room -= 1
            return await self._connect()
        fut = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        return await fut

    def restore(self, conn):
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(conn)
                return
        self._idle.append(conn)


class Proxy:
    def __init__(self, upstream):
        self.upstream = upstream

    async def forward(self, request):
        conn = await self.upstream.borrow()  # clean: restored in finally
        try:
            await conn.send(request)
            return await conn.recv()
        finally:
            self.upstream.restore(conn)

    async def probe(self):
        conn = await self.upstream.borrow()  # leak: a slow answer returns False and keeps the connection
        try:
            await asyncio.wait_for(conn.ping(), 1.0)
        except asyncio.TimeoutError:
            return False
        self.upstream.restore(conn)
        return True

    async def stream(self, requests):
        conn = await self.upstream.borrow()  # clean: one connection for all, restored at the end
        for request in requests:
            await conn.send(request)
        self.upstream.restore(conn)

    async def mirror(self, requests):
        for request in requests:
            conn = await self.upstream.borrow()  # leak: idempotent requests are skipped with it in hand
            if request.method == "GET":
                continue
            await conn.send(request)
            self.upstream.restore(conn)
