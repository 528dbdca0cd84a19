"""Requests to upstream servers: retries, hedging, streams."""
import asyncio
import logging
from dataclasses import dataclass
from typing import AsyncIterator, Optional

from .leases import Balancer, Lease, NoUpstream

log = logging.getLogger("gateway.client")


class Reset(Exception):
    """The server closed the connection in the middle."""


@dataclass
class Response:
    status: int
    body: str = ""


class StreamBody:
    """The chunks of a response; holds the lease until it is closed."""

    def __init__(self, lease: Lease):
        self._lease = lease
        self.ended = False

    async def chunks(self) -> AsyncIterator[str]:
        while (chunk := await self._lease.conn.read()) is not None:
            yield chunk
        self.ended = True

    def close(self) -> None:
        self._lease.release(reuse=self.ended)


class Client:
    def __init__(self, balancer: Balancer, tries: int = 3, timeout: float = 30.0):
        self.balancer = balancer
        self.tries = tries
        self.timeout = timeout

    async def call(self, path: str, body: str) -> Response:
        avoid = None
        for _ in range(self.tries):
            lease = await self.balancer.lease(avoid)  # leak: a timeout is answered with 504 while the lease is held
            try:
                status, text = await asyncio.wait_for(lease.conn.post(path, body), self.timeout)
            except Reset:
                avoid = lease.pool
                lease.release(reuse=False)
                continue
            except asyncio.TimeoutError:
                log.warning("%s timed out at %s", path, lease.pool.url)
                return Response(504)
            lease.release()
            return Response(status, text)
        return Response(502)

    async def _attempt(self, path: str, body: str) -> Response:
        lease = await self.balancer.lease()  # clean: near miss, the finally releases it, also when hedged() cancels the loser
        complete = False
        try:
            status, text = await lease.conn.post(path, body)
            complete = True
            return Response(status, text)
        finally:
            lease.release(reuse=complete)

    async def hedged(self, path: str, body: str, delay: float = 0.5) -> Response:
        first = asyncio.create_task(self._attempt(path, body))
        done, _ = await asyncio.wait([first], timeout=delay)
        if done:
            return first.result()
        second = asyncio.create_task(self._attempt(path, body))
        done, pending = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    async def stream(self, path: str, body: str) -> Optional[StreamBody]:
        lease = await self.balancer.lease()  # clean: near miss, released when the server declines, else it moves into the returned body
        try:
            status = await lease.conn.open_stream(path, body)
        except Reset:
            lease.release(reuse=False)
            return None
        if status != 200:
            lease.release()
            return None
        return StreamBody(lease)


class Tunnel:
    """Two connections for a realtime session, control and audio."""

    def __init__(self, balancer: Balancer):
        self.balancer = balancer
        self.control: Optional[Lease] = None
        self.audio: Optional[Lease] = None

    async def open(self) -> bool:
        if self.control is not None:
            return True
        self.control = await self.balancer.lease()  # clean: near miss, released when there is no second one, else by close()
        try:
            self.audio = await self.balancer.lease()  # leak: close() releases only the control connection
        except NoUpstream:
            self.control.release()
            self.control = None
            return False
        return True

    def close(self) -> None:
        if self.control is not None:
            self.control.release(reuse=False)
            self.control = None
