# take: await P.boot()
# give: await P.shut(X)
# gets: value
# type: SandboxFleet
import asyncio


class Sandbox:
    def __init__(self, ident):
        self.ident = ident
        self.runs = 0

    async def wipe(self):
        await asyncio.sleep(0)


class SandboxFleet:
    """Code-execution sandboxes for reward computation; worn-out ones are replaced."""

    def __init__(self, limit, max_runs=50):
        self._slots = asyncio.Semaphore(limit)
        self._warm = []
        self._max_runs = max_runs
        self._booted = 0

    async def boot(self):
        await self._slots.acquire()
        if self._warm:
            box = self._warm.pop()
        else:
            box = Sandbox(self._booted)
            self._booted += 1
        box.runs += 1
        return box

    async def shut(self, box):
        try:
            await box.wipe()
            if box.runs < self._max_runs:
                self._warm.append(box)
        finally:
            self._slots.release()
