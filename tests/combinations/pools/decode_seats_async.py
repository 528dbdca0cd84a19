# take: await P.sit()
# give: P.stand(X)
# gets: value
# type: DecodeSeats
import asyncio
from collections import deque


class DecodeSeats:
    """FIFO-fair seats of the decode batch: a freed seat goes straight to the longest waiter."""

    def __init__(self, n):
        self._vacant = deque(range(n))
        self._waiters = deque()

    async def sit(self):
        if self._vacant:
            return self._vacant.popleft()
        fut = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        try:
            return await fut
        except asyncio.CancelledError:
            if fut.done() and not fut.cancelled():
                self.stand(fut.result())
            elif fut in self._waiters:
                self._waiters.remove(fut)
            raise

    def stand(self, seat):
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(seat)
                return
        self._vacant.append(seat)
