"""Model replicas, each of which takes a few batches at once."""
import asyncio
import contextlib
import logging

logger = logging.getLogger("embedserve.replicas")


class ReplicaGone(Exception):
    pass


class NoReplica(Exception):
    pass


class Replica:
    def __init__(self, url, transport, width=2):
        self.url = url
        self.transport = transport
        self.permits = asyncio.Semaphore(width)
        self.busy = 0
        self.gone = False

    async def encode(self, texts, out):
        status, rows = await self.transport(self.url, texts)
        if status == 503:
            self.gone = True
            raise ReplicaGone(self.url)
        out[:len(rows)] = rows
        return len(rows)


class ReplicaSet:
    def __init__(self, urls, transport, width=2):
        self.all = [Replica(u, transport, width) for u in urls]

    def _pick(self):
        alive = [r for r in self.all if not r.gone]
        if not alive:
            raise NoReplica("all replicas are gone")
        return min(alive, key=lambda r: r.busy)

    async def claim(self):
        while True:
            replica = self._pick()
            await replica.permits.acquire()  # leak: for a replica that went away during the wait the loop picks another one and keeps the permit
            if replica.gone:
                logger.info("%s went away, trying another", replica.url)
                continue
            replica.busy += 1
            return replica

    def yield_back(self, replica):
        replica.busy -= 1
        replica.permits.release()

    @contextlib.asynccontextmanager
    async def claimed(self):
        replica = await self.claim()  # clean: the finally yields it back
        try:
            yield replica
        finally:
            self.yield_back(replica)

    async def reload_all(self, load):
        """Stop every replica between two batches and load new weights."""
        stopped = []
        try:
            for replica in self.all:
                await replica.permits.acquire()  # clean: near miss, whichever were stopped are released in the finally
                stopped.append(replica)
            await asyncio.gather(*(load(r.url) for r in self.all))
            for replica in self.all:
                replica.gone = False
        finally:
            for replica in stopped:
                replica.permits.release()
