"""License seats with a FIFO of futures for those who wait."""
import asyncio
from collections import deque


class SeatQueue:
    def __init__(self, seats):
        self._open = set(range(seats))
        self._line = deque()

    async def sit(self):
        if self._open:
            return self._open.pop()
        fut = asyncio.get_running_loop().create_future()
        self._line.append(fut)
        return await fut

    def stand(self, seat):
        while self._line:
            fut = self._line.popleft()
            if not fut.done():
                fut.set_result(seat)
                return
        self._open.add(seat)


class CadWorker:
    def __init__(self, seats, engine):
        self.seats = seats
        self.engine = engine
        self.seat = None

    async def login(self):
        self.seat = await self.seats.sit()  # clean: stored, given up by logout

    def logout(self):
        if self.seat is not None:
            self.seats.stand(self.seat)
            self.seat = None

    async def render(self, drawing):
        seat = await self.seats.sit()  # clean: given up in finally
        try:
            return await self.engine.render(drawing, seat)
        finally:
            self.seats.stand(seat)

    async def check(self, drawing):
        seat = await self.seats.sit()  # leak: seat kept when there are problems
        problems = await self.engine.lint(drawing, seat)
        if problems:
            return problems
        self.seats.stand(seat)
        return []


async def convert(seats, engine, files):
    for name in files:
        seat = await seats.sit()  # leak: the break keeps the seat
        if await engine.cancelled():
            break
        await engine.convert(name, seat)
        seats.stand(seat)


async def preview(seats, engine, drawing):
    seat = await seats.sit()  # clean: given up after use
    image = await engine.preview(drawing, seat)
    seats.stand(seat)
    return image
