import asyncio
import logging
from collections import deque
from typing import Any, Deque, List, Optional

logger = logging.getLogger(__name__)


class Sandbox:
    def __init__(self, sid: int, api: Any):
        self.sid = sid
        self.api = api
        self.dirty = False

    async def run(self, code: str, timeout: float) -> str:
        self.dirty = True
        return await asyncio.wait_for(self.api.exec(self.sid, code), timeout)

    async def healthy(self) -> bool:
        return await self.api.ping(self.sid)

    async def reset(self) -> None:
        await self.api.reset(self.sid)
        self.dirty = False


class SandboxFarm:
    def __init__(self, api: Any, n: int):
        self.api = api
        self._idle: Deque[Sandbox] = deque(Sandbox(i, api) for i in range(n))
        self._sick: List[Sandbox] = []

    def checkout(self) -> Optional[Sandbox]:
        return self._idle.popleft() if self._idle else None

    async def checkin(self, sb: Sandbox) -> None:
        if sb.dirty:
            await sb.reset()
        self._idle.append(sb)

    def quarantine(self, sb: Sandbox) -> None:
        self._sick.append(sb)

    async def heal(self) -> None:
        sick, self._sick = self._sick, []
        for sb in sick:
            await self.checkin(sb)

    async def checkout_healthy(self, tries: int) -> Optional[Sandbox]:
        for _ in range(tries):
            sb = self.checkout()  # clean: near miss, an unhealthy one goes to quarantine, which heal empties
            if sb is None:
                return None
            if await sb.healthy():
                return sb
            self.quarantine(sb)
        return None

    async def checkout_fresh(self, tries: int) -> Optional[Sandbox]:
        for _ in range(tries):
            sb = self.checkout()  # leak: a sandbox whose ping is false is left behind by the next try
            if sb is None:
                await asyncio.sleep(0.1)
                continue
            if not await sb.healthy():
                logger.info("sandbox %d not healthy", sb.sid)
                continue
            return sb
        return None

    async def sweep(self) -> int:
        bad = 0
        for _ in range(len(self._idle)):
            sb = self.checkout()  # clean: near miss, checked in again or quarantined
            if sb is None:
                break
            if not await sb.healthy():
                self.quarantine(sb)
                bad += 1
                continue
            await self.checkin(sb)
        return bad
