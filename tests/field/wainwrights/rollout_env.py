"""Rollouts for reinforcement learning from tool use.

Each episode needs a sandbox (a container that we reset between episodes) and a generation lane on the inference server.
Both are scarce.  Everything runs in one event loop; sandboxes are slow and flaky, so there are timeouts everywhere.
"""
from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

logger = logging.getLogger("rollout")


class SandboxDied(Exception):
    pass


class EpisodeRejected(Exception):
    pass


@dataclasses.dataclass(eq=False)
class Sandbox:
    ident: int
    backend: Any
    episodes: int = 0
    healthy: bool = True

    async def reset(self, image: str) -> None:
        self.episodes += 1
        if not await self.backend.reset(self.ident, image):
            self.healthy = False
            raise SandboxDied(f"sandbox {self.ident} did not reset to {image}")

    async def run(self, command: str) -> str:
        status, output = await self.backend.run(self.ident, command)
        if status is None:
            self.healthy = False
            raise SandboxDied(f"sandbox {self.ident}: {command[:40]!r}")
        return output


class SandboxPool:
    def __init__(self, backend: Any, size: int, max_episodes: int = 64) -> None:
        self.backend = backend
        self.max_episodes = max_episodes
        self._ids = itertools.count()
        self._ready: asyncio.Queue[Sandbox] = asyncio.Queue()
        self._lent: set[Sandbox] = set()
        for _ in range(size):
            self._ready.put_nowait(Sandbox(next(self._ids), backend))

    async def lease(self) -> Sandbox:
        box = await self._ready.get()  # clean: goes to the caller
        self._lent.add(box)
        return box

    async def lease_for(self, image: str) -> Sandbox:
        """A sandbox that has been reset to image."""
        box = await self._ready.get()  # leak: SandboxDied from reset passes through and the box is neither lent nor ready
        await box.reset(image)
        self._lent.add(box)
        return box

    def lease_nowait(self) -> Optional[Sandbox]:
        try:
            box = self._ready.get_nowait()  # clean: QueueEmpty means nothing was taken
        except asyncio.QueueEmpty:
            return None
        self._lent.add(box)
        return box

    def hand_back(self, box: Sandbox) -> None:
        self._lent.discard(box)
        if not box.healthy or box.episodes >= self.max_episodes:
            box = Sandbox(next(self._ids), self.backend)
        self._ready.put_nowait(box)


class Lanes:
    def __init__(self, n: int) -> None:
        self.n = n
        self._busy: dict[int, str] = {}
        self._cond = asyncio.Condition()

    async def enter(self, who: str, low: bool = False) -> int:
        async with self._cond:
            keep = 1 if low else 0
            await self._cond.wait_for(lambda: len(self._busy) < self.n - keep)
            lane = next(i for i in range(self.n) if i not in self._busy)  # clean: marked busy and returned
            self._busy[lane] = who
            return lane

    async def leave(self, lane: int) -> None:
        async with self._cond:
            self._busy.pop(lane, None)
            self._cond.notify_all()


@dataclasses.dataclass
class Task:
    name: str
    image: str
    prompt: str
    grade: Callable[[str], float]
    max_turns: int = 8


@dataclasses.dataclass
class Trajectory:
    task: str
    turns: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    reward: float = 0.0


class Episode:
    def __init__(self, task: Task, pool: SandboxPool, lanes: Lanes, policy: Any) -> None:
        self.task, self.pool, self.lanes, self.policy = task, pool, lanes, policy
        self.box: Optional[Sandbox] = None
        self.lane: Optional[int] = None
        self.trajectory = Trajectory(task.name)

    async def start(self) -> None:
        self.box = await self.pool.lease()  # clean: near miss, run() calls finish() in its finally even when start() raises
        await self.box.reset(self.task.image)
        self.lane = await self.lanes.enter(self.task.name)  # leak: finish() compares the lane by truth, and lane 0 is never left

    async def turn(self) -> bool:
        text = await self.policy.generate(self.lane, self.task.prompt, self.trajectory.turns)
        output = await self.box.run(text)
        self.trajectory.turns.append((text, output))
        return "<done>" not in text

    async def finish(self) -> None:
        box, self.box = self.box, None
        if box is not None:
            self.pool.hand_back(box)
        if self.lane:
            await self.lanes.leave(self.lane)
            self.lane = None

    async def run(self) -> Trajectory:
        try:
            await self.start()
            for _ in range(self.task.max_turns):
                if not await self.turn():
                    break
            self.trajectory.reward = self.task.grade(self.trajectory.turns[-1][1])
        finally:
            await self.finish()
        return self.trajectory


class Collector:
    def __init__(self, pool: SandboxPool, lanes: Lanes, policy: Any, limit_s: float = 600.0) -> None:
        self.pool, self.lanes, self.policy, self.limit_s = pool, lanes, policy, limit_s
        self._parked: dict[str, Sandbox] = {}

    async def one(self, task: Task) -> Optional[Trajectory]:
        try:
            return await asyncio.wait_for(Episode(task, self.pool, self.lanes, self.policy).run(), self.limit_s)
        except (SandboxDied, asyncio.TimeoutError) as exc:
            logger.info("%s: %s", task.name, exc or "timeout")
            return None

    async def replay(self, task: Task, commands: list[str]) -> Optional[str]:
        """Run recorded commands again, to see whether a reward is stable."""
        box = await self.pool.lease()  # leak: the timeout of a command is handled by a return that does not hand the box back
        output = ""
        for command in commands:
            try:
                output = await asyncio.wait_for(box.run(command), 30.0)
            except asyncio.TimeoutError:
                logger.info("%s: replay of %r timed out", task.name, command[:40])
                return None
            except SandboxDied:
                self.pool.hand_back(box)
                return None
        self.pool.hand_back(box)
        return output

    async def probe_image(self, image: str) -> bool:
        box = self.pool.lease_nowait()  # clean: None is left alone and the finally does the rest
        if box is None:
            return True
        try:
            await asyncio.wait_for(box.reset(image), 60.0)
            return True
        except (SandboxDied, asyncio.TimeoutError):
            box.healthy = False
            return False
        finally:
            self.pool.hand_back(box)

    async def park(self, task: Task) -> None:
        if task.name in self._parked:
            return
        box = await self.pool.lease_for(task.image)  # leak: unpark() with another image raises EpisodeRejected after taking the box out of the table
        self._parked[task.name] = box

    async def unpark(self, task: Task, image: str) -> Optional[Sandbox]:
        box = self._parked.pop(task.name, None)
        if box is None:
            return None
        if task.image != image:
            raise EpisodeRejected(f"{task.name} was parked with {task.image}, wanted {image}")
        return box

    async def with_parked(self, task: Task, image: str, use: Callable[[Sandbox], Awaitable[str]]) -> str:
        box = await self.unpark(task, image)
        if box is None:
            box = await self.pool.lease()  # clean: near miss, joins the parked ones and the finally hands either back
        try:
            return await use(box)
        finally:
            self.pool.hand_back(box)

    async def best_of(self, task: Task, n: int) -> Optional[Trajectory]:
        """n attempts at once; the first full reward cancels the rest."""
        jobs = [asyncio.ensure_future(self.one(task)) for _ in range(n)]
        best: Optional[Trajectory] = None
        for job in asyncio.as_completed(jobs):
            got = await job
            if got is not None and (best is None or got.reward > best.reward):
                best = got
            if best is not None and best.reward >= 1.0:
                break
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        return best

    async def shutdown(self) -> None:
        while self._parked:
            self.pool.hand_back(self._parked.popitem()[1])


async def lockstep(tasks: list[Task], pool: SandboxPool, lanes: Lanes, policy: Any) -> AsyncIterator[tuple[str, str]]:
    """One turn of every task, for debugging prompts.  Yields pairs of task name and output."""
    for task in random.sample(tasks, len(tasks)):
        box = await pool.lease()  # clean: reset failures hand it back and the normal way does too
        try:
            await box.reset(task.image)
        except SandboxDied:
            pool.hand_back(box)
            continue
        lane = await lanes.enter("lockstep", low=True)  # leak: a dead sandbox is handled by continue with the lane still entered
        text = await policy.generate(lane, task.prompt, [])
        try:
            output = await box.run(text)
        except SandboxDied:
            pool.hand_back(box)
            continue
        await lanes.leave(lane)
        pool.hand_back(box)
        yield task.name, output
