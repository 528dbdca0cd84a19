"""Leases of tool sandboxes for agent turns; boxes are kept warm per image."""
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, AsyncIterator

logger = logging.getLogger(__name__)


class ToolCrash(RuntimeError):
    pass


@dataclass
class Sandbox:
    box_id: int
    image: str
    port: int | None = None

    async def execute(self, argv: list[str]) -> dict[str, Any]:
        await asyncio.sleep(0)
        if not argv:
            raise ToolCrash("empty argv")
        return {"box": self.box_id, "rc": 0}


class SandboxFleet:
    def __init__(self, per_image: int) -> None:
        self.per_image = per_image
        self._sem: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(per_image))
        self._warm: dict[str, list[Sandbox]] = defaultdict(list)
        self._serial = 0

    async def lease(self, image: str) -> Sandbox:
        await self._sem[image].acquire()
        if self._warm[image]:
            return self._warm[image].pop()
        self._serial += 1
        return Sandbox(self._serial, image)

    def surrender(self, box: Sandbox, poisoned: bool = False) -> None:
        if not poisoned:
            self._warm[box.image].append(box)
        self._sem[box.image].release()


class PortBook:
    def __init__(self, lo: int, hi: int) -> None:
        self._open = set(range(lo, hi))

    def claim(self) -> int | None:
        return self._open.pop() if self._open else None

    def unclaim(self, port: int) -> None:
        self._open.add(port)


class BoxScope:
    def __init__(self, fleet: SandboxFleet, image: str) -> None:
        self.fleet, self.image = fleet, image
        self.box: Sandbox | None = None

    async def __aenter__(self) -> Sandbox:
        self.box = await self.fleet.lease(self.image)  # leak: __aexit__ returns early upon ToolCrash before surrendering
        return self.box

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, ToolCrash):
            logger.warning("tool crashed in %s", self.image)
            return True
        if self.box is not None:
            self.fleet.surrender(self.box, poisoned=exc_type is not None)
            self.box = None
        return False


@contextlib.asynccontextmanager
async def boxed(fleet: SandboxFleet, image: str) -> AsyncIterator[Sandbox]:
    box = await fleet.lease(image)  # clean: surrendered in finally whatever the body does
    try:
        yield box
    finally:
        fleet.surrender(box)


class ToolRunner:
    def __init__(self, fleet: SandboxFleet, ports: PortBook) -> None:
        self.fleet = fleet
        self.ports = ports
        self.sticky: dict[str, Sandbox] = {}

    async def run_once(self, image: str, argv: list[str], limit: float) -> dict[str, Any]:
        box = await self.fleet.lease(image)  # clean: near miss, each handler surrenders before it returns or raises
        try:
            result = await asyncio.wait_for(box.execute(argv), limit)
        except asyncio.TimeoutError:
            self.fleet.surrender(box, poisoned=True)
            return {"rc": 124}
        except BaseException:
            self.fleet.surrender(box, poisoned=True)
            raise
        self.fleet.surrender(box)
        return result

    async def run_retry(self, image: str, argv: list[str], attempts: int = 3) -> dict[str, Any]:
        for i in range(attempts):
            box = await self.fleet.lease(image)  # leak: every crashed attempt keeps its box and leases another
            try:
                result = await box.execute(argv)
            except ToolCrash:
                logger.info("attempt %d crashed", i)
                continue
            self.fleet.surrender(box)
            return result
        return {"rc": 1}

    async def run_patient(self, image: str, argv: list[str], attempts: int = 3) -> dict[str, Any]:
        for i in range(attempts):
            box = await self.fleet.lease(image)  # clean: near miss, finally runs for continue and return alike
            try:
                return await box.execute(argv)
            except ToolCrash:
                await asyncio.sleep(0.1 * i)
                continue
            finally:
                self.fleet.surrender(box)
        return {"rc": 1}

    async def expose(self, session: str, image: str) -> int | None:
        box = await self.fleet.lease(image)  # clean: near miss, without a port the box goes back at once
        port = self.ports.claim()  # leak: end_session surrenders the box but never unclaims box.port
        if port is None:
            self.fleet.surrender(box)
            return None
        box.port = port
        await self._evict(session)
        self.sticky[session] = box
        return port

    async def attach(self, session: str, image: str) -> Sandbox:
        box = self.sticky.get(session)
        if box is not None and box.image == image:
            return box
        fresh = await self.fleet.lease(image)  # leak: a box of another image kept for the session is overwritten
        self.sticky[session] = fresh
        return fresh

    async def _evict(self, session: str) -> None:
        old = self.sticky.pop(session, None)
        if old is not None:
            self.fleet.surrender(old)

    async def end_session(self, session: str) -> None:
        await self._evict(session)

    async def health(self, image: str) -> bool:
        port = self.ports.claim()  # clean: unclaimed in finally
        if port is None:
            return False
        try:
            async with boxed(self.fleet, image) as box:  # clean: the context manager surrenders
                return (await box.execute(["true", str(port)]))["rc"] == 0
        finally:
            self.ports.unclaim(port)

    async def lint(self, image: str, argv: list[str]) -> int:
        async with BoxScope(self.fleet, image) as box:
            return (await box.execute(argv))["rc"]
        return 1

    async def fan_out(self, image: str, jobs: list[list[str]]) -> list[dict[str, Any]]:
        out = []
        for argv in jobs:
            box = await self.fleet.lease(image)  # leak: break at the first failing job skips the surrender
            result = await box.execute(argv)
            out.append(result)
            if result["rc"] != 0:
                break
            self.fleet.surrender(box)
        return out
