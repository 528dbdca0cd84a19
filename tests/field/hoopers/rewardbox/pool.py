"""Sandboxes (containers with a port each) for code that a policy wrote."""
import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

logger = logging.getLogger("rewardbox.pool")


class NoPorts(Exception):
    pass


class StartFailed(Exception):
    pass


class SandboxDied(Exception):
    pass


class Ports:
    def __init__(self, first: int, count: int):
        self._free = set(range(first, first + count))

    def claim(self) -> int:
        if not self._free:
            raise NoPorts()
        return self._free.pop()  # clean: returned

    def unclaim(self, port: int) -> None:
        self._free.add(port)


@dataclass
class Sandbox:
    box_id: str
    port: int
    driver: object = field(repr=False)
    uses: int = 0

    async def run(self, code: str) -> str:
        self.uses += 1
        reply = await self.driver.exec(self.box_id, code)
        if reply is None:
            raise SandboxDied(self.box_id)
        return reply


class SandboxPool:
    def __init__(self, driver, ports: Ports, size: int, max_uses: int = 50):
        self._driver = driver
        self._ports = ports
        self._sem = asyncio.Semaphore(size)
        self._idle = deque()
        self.max_uses = max_uses
        self.started = self.buried = 0

    async def _spawn(self) -> Sandbox:
        port = self._ports.claim()  # leak: StartFailed is raised without unclaim
        box_id = await self._driver.create(port)  # clean: destroyed before StartFailed, else part of the Sandbox
        if not await self._driver.wait_ready(box_id, 10.0):
            await self._driver.destroy(box_id)
            raise StartFailed(box_id)
        self.started += 1
        return Sandbox(box_id, port, self._driver)

    async def _bury(self, box: Sandbox) -> None:
        self.buried += 1
        await self._driver.destroy(box.box_id)
        self._ports.unclaim(box.port)

    async def checkout(self) -> Sandbox:
        await self._sem.acquire()  # clean: near miss, checkin releases it, or the handler below
        while self._idle:
            box = self._idle.popleft()  # clean: returned or buried
            if await self._driver.alive(box.box_id):
                return box
            await self._bury(box)
        try:
            return await self._spawn()  # clean: returned
        except (StartFailed, NoPorts):
            self._sem.release()
            raise

    async def checkin(self, box: Sandbox, dirty: bool = False) -> None:
        if dirty or box.uses >= self.max_uses:
            await self._bury(box)
        else:
            self._idle.append(box)
        self._sem.release()

    async def close(self) -> None:
        while self._idle:
            await self._bury(self._idle.popleft())  # clean: buried at once
        logger.info("%d sandboxes started, %d buried", self.started, self.buried)
