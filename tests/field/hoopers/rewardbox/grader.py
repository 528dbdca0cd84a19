"""Rewards for rollouts: unit tests, pairwise races, tool episodes."""
import asyncio
import logging
import time
from typing import Dict, List, Optional

from .execution import Outcome, Repl, Session, run_once, run_retrying
from .pool import NoPorts, SandboxDied, SandboxPool, StartFailed

logger = logging.getLogger("rewardbox.grader")


class BaselineFailed(Exception):
    pass


class Grader:
    def __init__(self, pool: SandboxPool, workers: int = 8):
        self.pool = pool
        self.workers = workers
        self._repls: Dict[str, Repl] = {}
        self._speed: Optional[float] = None

    async def unit_tests(self, code: str, tests: List[str]) -> float:
        passed = 0
        for test in tests:
            result = await run_once(self.pool, f"{code}\n{test}", timeout=5.0)
            passed += result.ok
        return passed / max(1, len(tests))

    async def race(self, left: str, right: str) -> float:
        """Two programs at the same time; 1.0 when the left one ends first."""
        try:
            a = await self.pool.checkout()  # leak: the second checkout may raise StartFailed or NoPorts, which is answered with 0.5
            b = await self.pool.checkout()  # clean: finally
        except (StartFailed, NoPorts):
            return 0.5
        dirty = True
        try:
            tasks = [asyncio.create_task(a.run(left)), asyncio.create_task(b.run(right))]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            first = tasks[0] in done
            await asyncio.gather(*tasks, return_exceptions=True)
            dirty = any(t.exception() is not None for t in tasks)
            return 1.0 if first else 0.0
        finally:
            await self.pool.checkin(a, dirty)
            await self.pool.checkin(b, dirty)

    async def begin_episode(self, episode: str) -> Repl:
        old = self._repls.pop(episode, None)
        if old is not None:
            await old.close()
        repl = self._repls[episode] = await Repl.open(self.pool)  # clean: the former one is closed first and end_episode closes this one
        return repl

    async def end_episode(self, episode: str) -> None:
        repl = self._repls.pop(episode, None)
        if repl is not None:
            await repl.close()

    async def calibrate(self, probe: str, n: int = 4) -> float:
        """How fast are these machines?  Runs the probe on n boxes side by side."""
        boxes = []
        for _ in range(n):
            boxes.append(await self.pool.checkout())  # leak: BaselineFailed is raised before the loop that checks them in
        start = time.monotonic()
        outs = await asyncio.gather(*(b.run(probe) for b in boxes), return_exceptions=True)
        if any(isinstance(o, Exception) for o in outs):
            raise BaselineFailed(outs)
        self._speed = (time.monotonic() - start) / n
        for box in boxes:
            await self.pool.checkin(box)
        return self._speed

    async def _worker(self, todo: asyncio.Queue, out: Dict[str, Outcome]) -> None:
        box = await self.pool.checkout()  # clean: near miss, replaced only after checkin, the finally returns the last one
        try:
            while True:
                item = await todo.get()
                if item is None:
                    return
                key, code = item
                try:
                    out[key] = Outcome("ok", await box.run(code))
                except SandboxDied as exc:
                    out[key] = Outcome("died", str(exc))
                    dead, box = box, None
                    await self.pool.checkin(dead, dirty=True)
                    box = await self.pool.checkout()  # clean: near miss, box is None meanwhile, the finally tests for it
        finally:
            if box is not None:
                await self.pool.checkin(box)

    async def score_batch(self, programs: Dict[str, str]) -> Dict[str, Outcome]:
        todo: asyncio.Queue = asyncio.Queue()
        out: Dict[str, Outcome] = {}
        for item in programs.items():
            todo.put_nowait(item)
        for _ in range(self.workers):
            todo.put_nowait(None)
        await asyncio.gather(*(self._worker(todo, out) for _ in range(self.workers)))
        return out

    async def lint(self, code: str) -> Outcome:
        async with Session(self.pool) as box:  # clean: async with
            if not await box.run("import pyflakes"):
                return Outcome("missing")
            return Outcome("ok", await box.run(f"lint({code!r})"))

    async def robust(self, code: str) -> float:
        return 1.0 if (await run_retrying(self.pool, code)).ok else 0.0
