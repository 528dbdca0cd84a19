"""Credit window of a stream: bytes in flight until the peer acknowledges."""
import asyncio


class CreditWindow:
    def __init__(self, size):
        self.size = size
        self.in_flight = 0
        self._room = asyncio.Event()
        self._room.set()

    async def spend(self, n):
        n = min(n, self.size)
        while self.in_flight + n > self.size:
            self._room.clear()
            await self._room.wait()
        self.in_flight += n
        return n

    def earn(self, n):
        self.in_flight -= n
        if self.in_flight < self.size:
            self._room.set()


class StreamWriter:
    def __init__(self, window, wire):
        self.window = window
        self.wire = wire
        self.unacked = {}

    async def send(self, seq, frame):
        self.unacked[seq] = await self.window.spend(len(frame))  # clean: earned back by on_ack
        await self.wire.write(seq, frame)

    def on_ack(self, seq):
        n = self.unacked.pop(seq, 0)
        self.window.earn(n)

    async def send_and_wait(self, seq, frame):
        n = await self.window.spend(len(frame))  # clean: earned in finally
        try:
            return await self.wire.round_trip(seq, frame)
        finally:
            self.window.earn(n)

    async def probe(self, frame):
        n = await self.window.spend(len(frame))  # leak: no credit back when there is no reply
        reply = await self.wire.round_trip(0, frame)
        if reply is None:
            return False
        self.window.earn(n)
        return True


async def blast(window, wire, frames):
    for seq, frame in enumerate(frames):
        n = await window.spend(len(frame))  # leak: frames dropped by the wire keep the credit
        if not await wire.write(seq, frame):
            continue
        await wire.flush()
        window.earn(n)
