"""Sandboxed tool execution for agent rollouts: boxes, mounts and session objects."""
from __future__ import annotations

import asyncio
import logging
import shlex
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Iterator, Optional

log = logging.getLogger("sandbox")


@dataclass
class Box:
    name: str
    image: str
    runs: int = 0
    dirty: bool = False
    env: dict = field(default_factory=dict)

    async def execute(self, argv: list) -> tuple:
        self.runs += 1
        self.dirty = True
        await asyncio.sleep(0)
        return 0, " ".join(argv)


class BoxFleet:
    """lend() takes a box out of the fleet, reclaim() puts it back."""

    def __init__(self, image: str, size: int) -> None:
        self.image = image
        self._shelf: asyncio.Queue = asyncio.Queue()
        for i in range(size):
            self._shelf.put_nowait(Box(f"{image}-{i}", image))
        self.lent = 0

    async def lend(self) -> Box:
        box = await self._shelf.get()
        self.lent += 1
        return box

    def lend_now(self) -> Optional[Box]:
        if self._shelf.empty():
            return None
        self.lent += 1
        return self._shelf.get_nowait()

    def reclaim(self, box: Box) -> None:
        self.lent -= 1
        box.env.clear()
        box.dirty = False
        self._shelf.put_nowait(box)


class MountTable:
    """Scratch mounts, by number."""

    def __init__(self, limit: int) -> None:
        self._free = list(range(limit))
        self._used: set = set()

    def attach(self) -> int:
        if not self._free:
            return -1
        number = self._free.pop()
        self._used.add(number)
        return number

    def detach(self, number: int) -> None:
        self._used.discard(number)
        self._free.append(number)


@asynccontextmanager
async def boxed_keep_dirty(fleet: BoxFleet) -> AsyncIterator[Box]:
    box = await fleet.lend()  # leak: a dirty box is never reclaimed
    yield box
    if box.dirty:
        log.info("%s is dirty", box.name)
        return
    fleet.reclaim(box)


@contextmanager
def mounted(table: MountTable) -> Iterator[int]:
    number = table.attach()  # clean: near miss, -1 means that nothing was attached
    try:
        yield number
    finally:
        if number >= 0:
            table.detach(number)


async def run_with_mount(fleet: BoxFleet, table: MountTable, command: str) -> Optional[str]:
    number = table.attach()  # clean: near miss, both later returns detach
    if number < 0:
        return None
    box = fleet.lend_now()  # clean: reclaimed below when there is one
    if box is None:
        table.detach(number)
        return None
    box.env["SCRATCH"] = f"/scratch/{number}"
    _, out = await box.execute(shlex.split(command))
    fleet.reclaim(box)
    table.detach(number)
    return out


async def run_isolated(fleet: BoxFleet, table: MountTable, command: str) -> Optional[str]:
    box = await fleet.lend()  # leak: no mount left, and the box is not reclaimed
    number = table.attach()  # clean: detached at the end, -1 is no mount
    if number < 0:
        log.warning("no scratch mount for %s", command)
        return None
    box.env["SCRATCH"] = f"/scratch/{number}"
    _, out = await box.execute(shlex.split(command))
    table.detach(number)
    fleet.reclaim(box)
    return out


async def open_box(fleet: BoxFleet, setup: list) -> Box:
    """The box is the caller's."""
    box = await fleet.lend()  # clean: handed to the caller
    for command in setup:
        await box.execute(shlex.split(command))
    return box


async def image_version(fleet: BoxFleet) -> str:
    box = await open_box(fleet, ["true"])  # leak: the output is kept and the box never reclaimed
    _, out = await box.execute(["cat", "/etc/release"])
    return out.strip().partition(" ")[2]


class AgentSession:
    """One conversation of an agent with its tools; the box lives as long as the session."""

    def __init__(self, fleet: BoxFleet, agent: str) -> None:
        self.fleet, self.agent = fleet, agent
        self.box: Optional[Box] = None
        self.transcript: list = []

    async def call(self, command: str) -> str:
        if self.box is None:
            self.box = await self.fleet.lend()  # clean: near miss, only when None; end() reclaims
        _, out = await self.box.execute(shlex.split(command))
        self.transcript.append((command, out))
        return out

    def end(self) -> int:
        if self.box is not None:
            self.fleet.reclaim(self.box)
            self.box = None
        return len(self.transcript)


class SessionRegistry:
    """Boxes by the agent's name; idle ones are dropped by sweep(), all by shutdown()."""

    def __init__(self, fleet: BoxFleet, table: MountTable) -> None:
        self.fleet, self.table = fleet, table
        self._boxes: dict = {}
        self._mounts: dict = {}
        self._seen: dict = {}

    async def join(self, agent: str) -> None:
        if agent in self._boxes:
            self._seen[agent] = time.monotonic()
            return
        number = self.table.attach()  # leak: sweep() and shutdown() detach no mount
        if number >= 0:
            self._mounts[agent] = number
        self._boxes[agent] = await self.fleet.lend()  # clean: sweep() and shutdown() reclaim it
        self._seen[agent] = time.monotonic()

    def sweep(self, idle_s: float) -> list:
        now = time.monotonic()
        gone = [a for a, seen in self._seen.items() if now - seen > idle_s]
        for agent in gone:
            self.fleet.reclaim(self._boxes.pop(agent))
            self._mounts.pop(agent, None)
            del self._seen[agent]
        return gone

    def shutdown(self) -> None:
        for box in self._boxes.values():
            self.fleet.reclaim(box)
        self._boxes.clear()
        self._mounts.clear()
        self._seen.clear()


async def race(fleet: BoxFleet, command: str, copies: int) -> str:
    """Runs copies of one command and answers the first output."""
    boxes = [await fleet.lend() for _ in range(copies)]  # clean: all reclaimed after the race
    tasks = [asyncio.ensure_future(b.execute(shlex.split(command))) for b in boxes]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for box in boxes:
        fleet.reclaim(box)
    return next(iter(done)).result()[1]


async def scratch_report(table: MountTable, names: list) -> dict:
    report = {}
    for name in names:
        with mounted(table) as number:  # clean: near miss, the continue leaves the with and detaches
            if number < 0:
                continue
            report[name] = f"/scratch/{number}"
            await asyncio.sleep(0)
    return report
