# take: await P.ration(n)
# give: P.surrender(n)
# gets: nothing
# type: FairRations
import asyncio
from collections import deque


class FairRations:
    """Strict FIFO: a big prefill at the head isn't overtaken by small ones."""

    def __init__(self, tokens):
        self.left = tokens
        self._line = deque()

    async def ration(self, n):
        if not self._line and n <= self.left:
            self.left -= n
            return
        fut = asyncio.get_running_loop().create_future()
        entry = (n, fut)
        self._line.append(entry)
        try:
            await fut
        except asyncio.CancelledError:
            if entry in self._line:
                self._line.remove(entry)
            elif not fut.cancelled():
                self.left += n
            self._serve()
            raise

    def surrender(self, n):
        self.left += n
        self._serve()

    def _serve(self):
        while self._line:
            n, fut = self._line[0]
            if fut.done():
                self._line.popleft()
            elif n <= self.left:
                self._line.popleft()
                self.left -= n
                fut.set_result(None)
            else:
                break
