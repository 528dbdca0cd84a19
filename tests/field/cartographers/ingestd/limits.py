"""How much of a mirror may be used at one time."""
import asyncio


class HostBucket:
    """Concurrent requests by host."""

    def __init__(self, per_host):
        self.per_host = per_host
        self._now = {}
        self._free = asyncio.Event()

    def poke(self, host):
        n = self._now.get(host, 0)
        if n >= self.per_host:
            return False
        self._now[host] = n + 1
        return True

    async def enter(self, host):
        while not self.poke(host):  # clean: loop ends with the permit, which the caller gets
            self._free.clear()
            await self._free.wait()

    def leave(self, host):
        self._now[host] -= 1
        self._free.set()


class Parallel:
    """Total limit over a HostBucket."""

    def __init__(self, bucket, total):
        self.bucket = bucket
        self._total = asyncio.Semaphore(total)

    async def enter(self, host):
        await self._total.acquire()  # clean: left with the host permit by leave()
        await self.bucket.enter(host)  # clean: left by leave()

    async def enter_now(self, host):
        """Does not wait for the host."""
        await self._total.acquire()  # leak: total permit kept when the host is at its limit
        if not self.bucket.poke(host):  # clean: handed to the caller, who calls leave()
            return False
        return True

    def leave(self, host):
        self.bucket.leave(host)
        self._total.release()
