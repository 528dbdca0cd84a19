# take: await P.secure(n)
# give: await P.restore(n)
# gets: nothing
# type: TransferCredits
import asyncio


class TransferCredits:
    """Bytes of KV allowed on the wire towards one decode node."""

    def __init__(self, limit):
        self.limit = limit
        self.on_wire = 0
        self._changed = asyncio.Condition()

    async def secure(self, nbytes):
        nbytes = min(nbytes, self.limit)
        async with self._changed:
            await self._changed.wait_for(lambda: self.on_wire + nbytes <= self.limit)
            self.on_wire += nbytes

    async def restore(self, nbytes):
        nbytes = min(nbytes, self.limit)
        async with self._changed:
            self.on_wire -= nbytes
            self._changed.notify_all()
