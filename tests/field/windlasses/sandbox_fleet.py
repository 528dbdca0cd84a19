"""Pre-warmed code-execution sandboxes for RL rollouts (asyncio)."""
from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Awaitable, Callable

log = logging.getLogger("sandbox.fleet")


class FleetClosed(Exception):
    pass


Runner = Callable[[str, str], Awaitable[dict]]


@dataclass
class Sandbox:
    sid: str
    image: str
    runner: Runner
    runs: int = 0
    born: float = field(default_factory=time.monotonic)
    healthy: bool = True

    async def execute(self, code: str, timeout: float) -> dict:
        self.runs += 1
        return await asyncio.wait_for(self.runner(self.sid, code), timeout)

    async def ping(self) -> bool:
        res = await self.runner(self.sid, "true")
        return self.healthy and res["rc"] == 0


class Fleet:
    """checkout() waits for an idle sandbox, try_checkout() gives None at once."""

    def __init__(self, image: str, size: int, runner: Runner, max_runs: int = 200) -> None:
        self.image = image
        self.runner = runner
        self.max_runs = max_runs
        self._idle: deque[Sandbox] = deque(Sandbox(f"{image}-{i}", image, runner) for i in range(size))
        self._cond = asyncio.Condition()
        self._retired = 0
        self.closed = False

    async def checkout(self) -> Sandbox:
        async with self._cond:
            while not self._idle:
                await self._cond.wait()
            return self._idle.popleft()  # clean: handed to the caller

    async def try_checkout(self) -> Sandbox | None:
        async with self._cond:
            if not self._idle:
                return None
            return self._idle.pop()  # clean: handed to the caller

    async def checkout_fresh(self, max_age: float) -> Sandbox | None:
        """Youngest idle sandbox, or None when all of them are too old."""
        async with self._cond:
            if not self._idle:
                return None
            box = self._idle.pop()  # leak: popped from the idle deque and dropped when too old
            if time.monotonic() - box.born > max_age:
                return None
            return box

    async def checkin(self, box: Sandbox) -> None:
        async with self._cond:
            if box.runs >= self.max_runs or not box.healthy:
                self._retired += 1
                box = Sandbox(f"{self.image}-r{self._retired}", self.image, self.runner)
            self._idle.append(box)
            self._cond.notify()

    async def cull_sick(self) -> int:
        """Probe each idle sandbox once and replace those that do not answer."""
        async with self._cond:
            total = len(self._idle)
        culled = 0
        for _ in range(total):
            box = await self.try_checkout()  # clean: near miss, checkin() replaces an unhealthy one itself
            if box is None:
                break
            if not await box.ping():
                box.healthy = False
                culled += 1
            await self.checkin(box)
        return culled


class SandboxLease:
    """async with SandboxLease(fleet) as box: ..."""

    def __init__(self, fleet: Fleet, keep_on_failure: bool = False) -> None:
        self.fleet = fleet
        self.keep_on_failure = keep_on_failure
        self.box: Sandbox | None = None

    async def __aenter__(self) -> Sandbox:
        self.box = await self.fleet.checkout()  # leak: __aexit__ returns early on TimeoutError with the box still out
        return self.box

    async def __aexit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, asyncio.TimeoutError):
            log.warning("sandbox %s timed out", self.box.sid)
            return True
        await self.fleet.checkin(self.box)
        self.box = None
        return False


class StrictLease:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.box: Sandbox | None = None

    async def __aenter__(self) -> Sandbox:
        self.box = await self.fleet.checkout()  # clean: __aexit__ checks it in on every way out
        return self.box

    async def __aexit__(self, et, ev, tb) -> bool:
        box, self.box = self.box, None
        if et is not None:
            box.healthy = False
        await self.fleet.checkin(box)
        return False


@dataclass
class Episode:
    eid: str
    steps: list[str]
    box: Sandbox | None = None
    log: list[dict] = field(default_factory=list)


class EpisodeRunner:
    def __init__(self, fleet: Fleet, step_timeout: float = 10.0) -> None:
        self.fleet = fleet
        self.step_timeout = step_timeout
        self.active: dict[str, Episode] = {}

    async def start(self, ep: Episode) -> None:
        if ep.eid in self.active:
            await self.stop(ep.eid)
        ep.box = await self.fleet.checkout()  # clean: near miss, lives on the episode until stop() or stop_all()
        self.active[ep.eid] = ep

    async def step(self, eid: str) -> dict | None:
        ep = self.active.get(eid)
        if ep is None or not ep.steps:
            return None
        res = await ep.box.execute(ep.steps.pop(0), self.step_timeout)
        ep.log.append(res)
        return res

    async def stop(self, eid: str) -> None:
        ep = self.active.pop(eid, None)
        if ep is not None:
            box, ep.box = ep.box, None
            await self.fleet.checkin(box)

    async def stop_all(self) -> None:
        for eid in list(self.active):
            await self.stop(eid)

    async def swap_box(self, eid: str) -> bool:
        """Give the episode another sandbox after a crash."""
        ep = self.active.get(eid)
        if ep is None:
            return False
        spare = await self.fleet.try_checkout()  # clean: near miss, swapped in and the old box is checked in
        if spare is None:
            return False
        old, ep.box = ep.box, spare
        old.healthy = False
        await self.fleet.checkin(old)
        return True

    async def fork(self, eid: str, new_eid: str) -> Episode | None:
        """Branch an episode; the copy replays the parent's log on its own box."""
        if new_eid in self.active:
            return None
        box = await self.fleet.checkout()  # leak: unknown parent returns None without checkin
        parent = self.active.get(eid)
        if parent is None:
            log.info("fork of unknown episode %s", eid)
            return None
        child = Episode(new_eid, list(parent.steps), box)
        self.active[new_eid] = child
        return child

    async def one_shot(self, code: str) -> dict:
        box = await self.fleet.checkout()  # clean: checked in by finally
        try:
            return await box.execute(code, self.step_timeout)
        finally:
            await self.fleet.checkin(box)

    async def best_of(self, code: str, tries: int) -> dict | None:
        """Retry on a new sandbox until one gives rc 0."""
        for attempt in range(tries):
            box = await self.fleet.checkout()  # leak: a non-zero rc goes round again without checkin
            res = await box.execute(code, self.step_timeout)
            if res["rc"] != 0:
                log.info("attempt %d failed on %s", attempt, box.sid)
                continue
            await self.fleet.checkin(box)
            return res
        return None

    async def majority(self, code: str, n: int) -> int:
        boxes: list[Sandbox] = []
        for _ in range(n):
            box = await self.fleet.try_checkout()  # clean: all boxes are checked in after the gather
            if box is None:
                break
            boxes.append(box)
        results = await asyncio.gather(
            *(b.execute(code, self.step_timeout) for b in boxes), return_exceptions=True
        )
        for b in boxes:
            await self.fleet.checkin(b)
        return sum(1 for r in results if isinstance(r, dict) and r["rc"] == 0)

    async def guarded(self, code: str) -> dict:
        async with StrictLease(self.fleet) as box:  # clean: released by the context manager
            return await box.execute(code, self.step_timeout)


async def health_report(fleet: Fleet, want: int) -> dict[str, bool]:
    report: dict[str, bool] = {}
    held: list[Sandbox] = []
    while len(held) < want:
        box = await fleet.checkout_fresh(600.0)  # clean: held is checked in below
        if box is None:
            break
        held.append(box)
        report[box.sid] = await box.ping()
    while held:
        await fleet.checkin(held.pop())
    return report


async def warm_image(fleet: Fleet, script: str) -> bool:
    if fleet.closed:
        raise FleetClosed(fleet.image)
    box = await fleet.try_checkout()  # leak: an unhealthy box is neither checked in nor kept
    if box is None:
        return False
    if await box.ping():
        await box.execute(script, 60.0)
        await fleet.checkin(box)
        return True
    return False
