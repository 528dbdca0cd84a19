"""Concurrency permits of a crawler, with time-outs."""
import asyncio


class Permits:
    def __init__(self, limit):
        self._free = limit
        self._waiters = []

    async def enter(self):
        while self._free == 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._free -= 1

    def exit(self):
        self._free += 1
        if self._waiters:
            self._waiters.pop(0).set_result(None)


class Spider:
    def __init__(self, permits, http):
        self.permits = permits
        self.http = http
        self.seen = set()

    async def enter_host(self, host):
        await self.http.resolve(host)
        await self.permits.enter()  # clean: the caller exits

    async def fetch(self, host, path):
        await self.enter_host(host)  # clean: finally
        try:
            return await self.http.get(host, path)
        finally:
            self.permits.exit()

    async def fetch_new(self, host, path):
        await self.enter_host(host)  # leak: a page seen before returns inside
        if (host, path) in self.seen:
            return None
        self.seen.add((host, path))
        body = await self.http.get(host, path)
        self.permits.exit()
        return body

    async def fetch_quick(self, host, path, seconds):
        await self.enter_host(host)  # leak: the time-out is turned into an empty body without exit
        try:
            body = await asyncio.wait_for(self.http.get(host, path), seconds)
        except asyncio.TimeoutError:
            return b""
        self.permits.exit()
        return body

    async def fetch_patient(self, host, path, seconds):
        await self.enter_host(host)  # clean: exits after the time-out too
        try:
            body = await asyncio.wait_for(self.http.get(host, path), seconds)
        except asyncio.TimeoutError:
            body = b""
        self.permits.exit()
        return body

    async def robots(self, hosts):
        out = {}
        for host in hosts:
            await self.permits.enter()  # clean: exits each round
            out[host] = await self.http.get(host, "/robots.txt")
            self.permits.exit()
        return out
