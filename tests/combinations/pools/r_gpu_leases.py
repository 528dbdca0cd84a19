# take: await P.lease()
# give: await X.aclose()
# gets: value
# type: DeviceBroker
import asyncio
import logging

logger = logging.getLogger("rl.broker")


class DeviceLease:
    def __init__(self, broker, device):
        self.device = device
        self._broker = broker
        self.ended = False

    async def aclose(self):
        async with self._broker._cond:
            if self.ended:
                return
            self.ended = True
            self._broker._unleased.add(self.device)
            self._broker._cond.notify()
        logger.info("cuda:%d back", self.device)


class DeviceBroker:
    def __init__(self, devices):
        self._unleased = set(devices)
        self._cond = asyncio.Condition()

    async def lease(self):
        async with self._cond:
            await self._cond.wait_for(lambda: bool(self._unleased))
            device = self._unleased.pop()
        return DeviceLease(self, device)
