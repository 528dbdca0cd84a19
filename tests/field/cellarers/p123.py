"""Send window of a multiplexed protocol, counted in credits."""
import asyncio


class SendWindow:
    def __init__(self, initial=65535):
        self.credits = initial
        self._more = asyncio.Event()

    async def spend(self, want):
        while self.credits == 0:
            self._more.clear()
            await self._more.wait()
        granted = min(want, self.credits)
        self.credits -= granted
        return granted

    def replenish(self, n):
        self.credits += n
        self._more.set()


class Stream:
    def __init__(self, window, transport):
        self.window = window
        self.transport = transport
        self.unacked = 0

    async def write(self, data):
        while data:
            n = await self.window.spend(len(data))  # clean: counted in unacked, replenished by on_ack()
            self.unacked += n
            await self.transport.send(data[:n])
            data = data[n:]

    def on_ack(self, n):
        self.unacked -= n
        self.window.replenish(n)

    async def write_local(self, data):
        n = await self.window.spend(len(data))  # clean: replenished in finally
        try:
            await self.transport.loop(data[:n])
        finally:
            self.window.replenish(n)
        return n

    async def write_whole(self, data):
        n = await self.window.spend(len(data))  # leak: a grant that is too small is kept
        if n < len(data):
            return False
        await self.transport.send(data)
        self.window.replenish(n)
        return True

    async def probe(self):
        await self.window.spend(1)  # leak: the credit of the probe is never replenished
        await self.transport.send(b"\0")
