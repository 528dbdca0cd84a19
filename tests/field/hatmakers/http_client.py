"""Asynchronous HTTP/1.1 client with keep-alive connections per host, redirects, retries and a download helper."""
from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional
from urllib.parse import urlsplit

log = logging.getLogger("http")


@dataclass
class Response:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def keep_alive(self) -> bool:
        return self.headers.get("connection", "keep-alive") != "close"


class Link:
    """One keep-alive connection."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.requests = 0
        self.alive = True

    async def request(self, method: str, path: str, body: bytes = b"") -> Response:
        await asyncio.sleep(0)
        self.requests += 1
        return Response(200, {"content-length": str(len(body))}, body)

    async def chunks(self, path: str) -> AsyncIterator[bytes]:
        for part in path.split("/"):
            await asyncio.sleep(0)
            yield part.encode()


class LinkPool:
    def __init__(self, per_host: int) -> None:
        self.per_host = per_host
        self._idle: dict[str, list[Link]] = defaultdict(list)
        self._open: dict[str, int] = defaultdict(int)
        self._waiters: dict[str, list[asyncio.Future]] = defaultdict(list)

    async def lease(self, host: str) -> Link:
        while True:
            if self._idle[host]:
                return self._idle[host].pop()
            if self._open[host] < self.per_host:
                self._open[host] += 1
                return Link(host)
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[host].append(waiter)
            await waiter

    def lease_idle(self, host: str) -> Optional[Link]:
        return self._idle[host].pop() if self._idle[host] else None

    def unlease(self, link: Link) -> None:
        if link.alive:
            self._idle[link.host].append(link)
        else:
            self._open[link.host] -= 1
        waiters = self._waiters[link.host]
        while waiters:
            waiter = waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                break

    def kill(self, link: Link) -> None:
        link.alive = False
        self.unlease(link)

    def borrow(self, host: str) -> "Borrowed":
        return Borrowed(self, host)


class Borrowed:
    """async with pool.borrow(host) as link"""

    def __init__(self, pool: LinkPool, host: str) -> None:
        self._pool = pool
        self._host = host
        self._link: Optional[Link] = None

    async def __aenter__(self) -> Link:
        self._link = await self._pool.lease(self._host)  # clean: __aexit__ gives it back on every way
        return self._link

    async def __aexit__(self, exc_type, exc, tb) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        if exc_type is not None:
            self._pool.kill(link)
            return
        self._pool.unlease(link)


class Client:
    def __init__(self, pool: LinkPool, max_redirects: int = 5) -> None:
        self.pool = pool
        self.max_redirects = max_redirects
        self.cookies: dict[str, str] = {}
        self._sockets: dict[int, Link] = {}

    async def get(self, url: str) -> Response:
        parts = urlsplit(url)
        async with self.pool.borrow(parts.netloc) as link:  # clean: context manager
            response = await link.request("GET", parts.path)
            if response.status == 304:
                return response
            self.cookies.update(response.headers)
            return response

    async def head(self, url: str) -> Optional[int]:
        parts = urlsplit(url)
        link = await self.pool.lease(parts.netloc)  # leak: an answer without a length returns None before unlease
        response = await link.request("HEAD", parts.path)
        length = response.headers.get("content-length")
        if length is None:
            return None
        self.pool.unlease(link)
        return int(length)

    async def options(self, url: str) -> list[str]:
        parts = urlsplit(url)
        link = self.pool.lease_idle(parts.netloc)  # clean: near miss, unleased or killed at the end
        if link is None:
            link = await self.pool.lease(parts.netloc)  # clean: near miss, only where there was no idle one
        response = await link.request("OPTIONS", parts.path)
        if response.keep_alive:
            self.pool.unlease(link)
        else:
            self.pool.kill(link)
        return response.headers.get("allow", "").split(",")

    async def follow(self, url: str) -> Optional[Response]:
        for _ in range(self.max_redirects):
            parts = urlsplit(url)
            link = await self.pool.lease(parts.netloc)  # leak: a redirect goes round with the link of the old host
            response = await link.request("GET", parts.path)
            if response.status in (301, 302, 307):
                url = response.headers["location"]
                continue
            self.pool.unlease(link)
            return response
        return None

    async def post(self, url: str, body: bytes, attempts: int = 3) -> Optional[Response]:
        parts = urlsplit(url)
        for attempt in range(attempts):
            link = await self.pool.lease(parts.netloc)  # clean: near miss, killed before the next attempt
            response = await link.request("POST", parts.path, body)
            if response.status >= 500:
                self.pool.kill(link)
                await asyncio.sleep(2 ** attempt)
                continue
            self.pool.unlease(link)
            return response
        return None

    async def put(self, url: str, body: bytes) -> bool:
        parts = urlsplit(url)
        link = await self.pool.lease(parts.netloc)  # leak: a dead link is marked and replaced without kill
        response = await link.request("PUT", parts.path, body)
        if not response.keep_alive:
            link.alive = False
            link = await self.pool.lease(parts.netloc)  # clean: unleased below
            response = await link.request("PUT", parts.path, body)
        self.pool.unlease(link)
        return response.status < 300

    async def download(self, url: str) -> AsyncIterator[bytes]:
        parts = urlsplit(url)
        link = await self.pool.lease(parts.netloc)  # clean: finally of the generator
        complete = False
        try:
            async for chunk in link.chunks(parts.path):
                yield chunk
            complete = True
        finally:
            if complete:
                self.pool.unlease(link)
            else:
                self.pool.kill(link)

    async def race(self, hosts: list[str], path: str) -> Optional[Response]:
        """Asks all hosts, takes the first good answer."""
        links = [await self.pool.lease(host) for host in hosts]  # leak: those behind the first good one stay leased
        for link in links:
            response = await link.request("GET", path)
            self.pool.unlease(link)
            if response.status == 200:
                return response
        return None

    async def scatter(self, hosts: list[str], path: str) -> list[int]:
        async with AsyncExitStack() as stack:
            links = []
            for host in hosts:
                links.append(await stack.enter_async_context(self.pool.borrow(host)))  # clean: near miss, exit stack
            answers = await asyncio.gather(*(link.request("GET", path) for link in links))
            return [answer.status for answer in answers]

    # upgraded connections ----------------------------------------------------------------------------------
    async def upgrade(self, url: str) -> Optional[int]:
        parts = urlsplit(url)
        link = await self.pool.lease(parts.netloc)  # clean: near miss, stored by id, hang_up() and close() end it
        response = await link.request("GET", parts.path)
        if response.status != 101:
            self.pool.unlease(link)
            return None
        self._sockets[id(link)] = link
        return id(link)

    def hang_up(self, ident: int) -> None:
        link = self._sockets.pop(ident, None)
        if link is not None:
            self.pool.kill(link)

    def close(self) -> None:
        while self._sockets:
            _, link = self._sockets.popitem()
            self.pool.kill(link)


async def ping(pool: LinkPool, host: str, interval: float, stop: asyncio.Event) -> int:
    count = 0
    while not stop.is_set():
        link = pool.lease_idle(host)  # leak: a link that served too much breaks out of the loop unreturned
        if link is None:
            await asyncio.sleep(interval)
            continue
        if link.requests > 10_000:
            log.info("link to %s is worn out", host)
            break
        await link.request("OPTIONS", "*")
        pool.unlease(link)
        count += 1
    return count
