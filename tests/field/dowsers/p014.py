"""Send credits for a KV transfer link (asyncio condition)."""
import asyncio


class CreditWindow:
    def __init__(self, window):
        self._credits = window
        self._cond = asyncio.Condition()

    async def spend(self, n=1):
        async with self._cond:
            await self._cond.wait_for(lambda: self._credits >= n)
            self._credits -= n

    async def replenish(self, n=1):
        async with self._cond:
            self._credits += n
            self._cond.notify_all()


class KvSender:
    def __init__(self, window: CreditWindow, sock):
        self.window = window
        self.sock = sock

    async def send_page(self, page):
        await self.window.spend()  # clean: replenished in finally
        try:
            await self.sock.send(page)
            await self.sock.ack()
        finally:
            await self.window.replenish()

    async def send_pages(self, pages):
        sent = 0
        for page in pages:
            await self.window.spend()  # leak: an already resident page continues without the credit
            if await self.sock.peer_has(page):
                continue
            await self.sock.send(page)
            await self.window.replenish()
            sent += 1
        return sent

    async def send_burst(self, pages):
        await self.window.spend(len(pages))  # leak: a closed socket returns with the credits spent
        if self.sock.closed:
            return False
        await self.sock.sendv(pages)
        await self.window.replenish(len(pages))
        return True

    async def ping(self):
        await self.window.spend(1)  # clean: replenished on both branches
        if self.sock.closed:
            await self.window.replenish(1)
            return None
        rtt = await self.sock.ping()
        await self.window.replenish(1)
        return rtt
