"""Async context manager over a bounded set of engine clients."""
import asyncio
import contextlib


class ClientSet:
    def __init__(self, clients):
        self._clients = list(clients)
        self._sem = asyncio.Semaphore(len(self._clients))

    async def get_client(self):
        await self._sem.acquire()
        return self._clients.pop(0)

    def put_client(self, client):
        self._clients.append(client)
        self._sem.release()

    @contextlib.asynccontextmanager
    async def client(self):
        c = await self.get_client()
        try:
            yield c
        finally:
            self.put_client(c)


class Router:
    def __init__(self, clients: ClientSet):
        self.clients = clients

    async def chat(self, messages):
        async with self.clients.client() as c:  # clean: async with
            return await c.chat(messages)

    async def tokenize(self, text):
        c = await self.clients.get_client()  # clean: put back in finally
        try:
            return await c.tokenize(text)
        finally:
            self.clients.put_client(c)

    async def health(self):
        c = await self.clients.get_client()  # leak: an unhealthy client is not put back
        if not await c.healthy():
            return False
        self.clients.put_client(c)
        return True

    async def broadcast(self, msg, times):
        for _ in range(times):
            c = await self.clients.get_client()  # leak: overwritten in each turn
            await c.send(msg)
        self.clients.put_client(c)

    async def dedicated(self):
        return await self.clients.get_client()  # clean: handed to the caller

    async def abort(self, rid):
        c = await self.dedicated()  # clean: put back after the abort
        await c.abort(rid)
        self.clients.put_client(c)
