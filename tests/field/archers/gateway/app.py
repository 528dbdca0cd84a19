"""The handlers and the shutdown."""
import asyncio
import logging
from contextlib import contextmanager
from typing import Awaitable, Callable, Iterator

from .client import Client, Reset, Response
from .leases import Balancer, Lease, NoUpstream

log = logging.getLogger("gateway.app")


class Drain:
    """Counts the requests that are in the house; the shutdown waits for zero."""

    def __init__(self) -> None:
        self._count = 0
        self._zero = asyncio.Event()
        self._zero.set()
        self.closing = False

    def enter(self) -> bool:
        if self.closing:
            return False
        self._count += 1
        self._zero.clear()
        return True

    def leave(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._zero.set()

    @contextmanager
    def inside(self) -> Iterator[bool]:
        entered = self.enter()  # clean: near miss, the flag tells whether the finally has to leave
        try:
            yield entered
        finally:
            if entered:
                self.leave()

    async def wait(self, timeout: float) -> bool:
        try:
            await asyncio.wait_for(self._zero.wait(), timeout)
            return True
        except asyncio.TimeoutError:
            return False


class Gateway:
    def __init__(self, balancer: Balancer, client: Client, authorised: Callable[[str], bool]):
        self.balancer = balancer
        self.client = client
        self.authorised = authorised
        self.drain = Drain()
        self._mirrors: set[asyncio.Task] = set()

    async def complete(self, key: str, body: str) -> Response:
        if not self.drain.enter():  # leak: a wrong key is answered with 401 without leaving
            return Response(503)
        if not self.authorised(key):
            return Response(401)
        try:
            return await self.client.call("/v1/completions", body)
        except NoUpstream:
            return Response(503)
        finally:
            self.drain.leave()

    async def embed(self, key: str, body: str) -> Response:
        with self.drain.inside() as entered:  # clean: the context manager leaves if it entered
            if not entered or not self.authorised(key):
                return Response(503 if not entered else 401)
            return await self.client.hedged("/v1/embeddings", body)

    async def chat(self, key: str, body: str, send: Callable[[str], Awaitable[None]]) -> Response:
        if not self.authorised(key):
            return Response(401)
        stream = await self.client.stream("/v1/chat", body)  # leak: a browser that went away ends the handler without closing the body
        if stream is None:
            return Response(502)
        try:
            async for chunk in stream.chunks():
                await send(chunk)
        except ConnectionResetError:
            log.info("browser went away")
            return Response(499)
        except Reset:
            stream.close()
            return Response(502)
        stream.close()
        return Response(200)

    async def mirror(self, body: str) -> None:
        """Sends a copy of a request to a second server, without waiting for it."""
        try:
            lease = await self.balancer.lease()  # leak: shutdown() cancels the task, which only knows Reset and the good end
        except NoUpstream:
            return
        task = asyncio.create_task(self._send_mirror(lease, body))
        self._mirrors.add(task)
        task.add_done_callback(self._mirrors.discard)

    async def _send_mirror(self, lease: Lease, body: str) -> None:
        try:
            await lease.conn.post("/v1/completions", body)
        except Reset:
            lease.release(reuse=False)
        else:
            lease.release()

    async def shutdown(self, grace: float = 20.0) -> None:
        self.drain.closing = True
        if not await self.drain.wait(grace):
            log.warning("requests still running")
        for task in list(self._mirrors):
            task.cancel()
        for pool in self.balancer.pools:
            pool.close()
