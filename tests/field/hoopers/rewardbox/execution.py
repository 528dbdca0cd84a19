"""Ways to run a snippet: once, with retries, in a session of several turns."""
import asyncio
import logging
from dataclasses import dataclass
from typing import List, Optional

from .pool import NoPorts, Sandbox, SandboxDied, SandboxPool, StartFailed

logger = logging.getLogger("rewardbox.exec")


@dataclass
class Outcome:
    status: str
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class Session:
    """`async with Session(pool) as box`; a box that saw an exception is not reused."""

    def __init__(self, pool: SandboxPool):
        self._pool = pool
        self._box: Optional[Sandbox] = None

    async def __aenter__(self) -> Sandbox:
        self._box = await self._pool.checkout()  # clean: __aexit__ checks it in
        return self._box

    async def __aexit__(self, kind, exc, tb) -> None:
        box, self._box = self._box, None
        await self._pool.checkin(box, dirty=kind is not None)


async def run_once(pool: SandboxPool, code: str, timeout: float) -> Outcome:
    box = await pool.checkout()  # leak: a timeout returns its Outcome without checkin
    try:
        out = await asyncio.wait_for(box.run(code), timeout)
    except asyncio.TimeoutError:
        return Outcome("timeout")
    except SandboxDied as exc:
        await pool.checkin(box, dirty=True)
        return Outcome("died", str(exc))
    await pool.checkin(box)
    return Outcome("ok", out)


async def run_retrying(pool: SandboxPool, code: str, tries: int = 3) -> Outcome:
    for attempt in range(tries):
        try:
            box = await pool.checkout()  # clean: near miss, the inner finally covers return and continue
        except (StartFailed, NoPorts):
            await asyncio.sleep(2 ** attempt)
            continue
        dirty = True
        try:
            out = await box.run(code)
            dirty = False
            return Outcome("ok", out)
        except SandboxDied:
            logger.info("attempt %d died", attempt)
            continue
        finally:
            await pool.checkin(box, dirty=dirty)
    return Outcome("died")


async def run_many(pool: SandboxPool, codes: List[str]) -> List[Outcome]:
    async def one(code: str) -> Outcome:
        try:
            async with Session(pool) as box:  # clean: async with
                return Outcome("ok", await box.run(code))
        except SandboxDied as exc:
            return Outcome("died", str(exc))
    return list(await asyncio.gather(*(one(c) for c in codes)))


class Repl:
    """Tool environment of one episode: state survives from turn to turn."""

    def __init__(self, pool: SandboxPool, box: Sandbox):
        self._pool = pool
        self._box: Optional[Sandbox] = box
        self.history: List[str] = []

    @classmethod
    async def open(cls, pool: SandboxPool) -> "Repl":
        box = await pool.checkout()  # leak: close() does nothing for an episode without a turn
        return cls(pool, box)

    async def turn(self, code: str) -> Outcome:
        if self._box is None:
            return Outcome("closed")
        self.history.append(code)
        try:
            return Outcome("ok", await self._box.run(code))
        except SandboxDied as exc:
            box, self._box = self._box, None
            await self._pool.checkin(box, dirty=True)
            return Outcome("died", str(exc))

    async def close(self) -> None:
        if self.history and self._box is not None:
            box, self._box = self._box, None
            await self._pool.checkin(box, dirty=True)
