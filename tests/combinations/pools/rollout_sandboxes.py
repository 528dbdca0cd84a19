# take: await P.spawn_or_reuse()
# give: await P.send_home(X)
# gets: value
# type: SandboxFleet
import asyncio
import logging

LOG = logging.getLogger(__name__)


class SandboxFleet:
    """Tool-use sandboxes for RL rollouts. `start` boots one (slow), `wipe` resets one."""

    def __init__(self, start, wipe, max_fleet=8):
        self._start, self._wipe = start, wipe
        self._docked = []
        self._slots = asyncio.Semaphore(max_fleet)

    async def spawn_or_reuse(self):
        await self._slots.acquire()
        try:
            if self._docked:
                return self._docked.pop()
            return await self._start()
        except BaseException:
            self._slots.release()
            raise

    async def send_home(self, box):
        try:
            await self._wipe(box)
        except Exception:
            LOG.exception("wipe failed, scrapping sandbox")
        else:
            self._docked.append(box)
        finally:
            self._slots.release()
