from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from .runner import Problem, Repl, Verdict, grade
from .sandbox import Sandbox, SandboxDied, SandboxPool

log = logging.getLogger("evalfarm")


@dataclass(eq=False)
class Submission:
    problem: Problem
    code: str
    tries: int = 0


class Farm:
    """Workers take submissions from a queue until it is joined."""

    def __init__(self, pools: dict[str, SandboxPool], per_run: float = 20.0) -> None:
        self.pools = pools
        self.per_run = per_run
        self.queue: asyncio.Queue[Submission | None] = asyncio.Queue()
        self.verdicts: list[Verdict] = []
        self.reserved: dict[str, tuple[SandboxPool, Sandbox]] = {}

    async def worker(self, language: str) -> None:
        """One sandbox per worker, borrowed late and exchanged when it fails."""
        pool = self.pools[language]
        box: Sandbox | None = None
        try:
            while (sub := await self.queue.get()) is not None:
                if box is None:
                    box = await pool.borrow()  # clean: near miss, held over the loop, discarded after a failure or given back at the end
                try:
                    verdict = await asyncio.wait_for(self._in(box, sub), self.per_run)
                except (asyncio.TimeoutError, SandboxDied) as exc:
                    log.warning("%s: %r", sub.problem.name, exc)
                    await pool.discard(box)
                    box = None
                    continue
                self.verdicts.append(verdict)
        finally:
            if box is not None:
                await pool.give_back(box)

    async def _in(self, box: Sandbox, sub: Submission) -> Verdict:
        verdict = Verdict(sub.problem.name, total=len(sub.problem.tests))
        for stdin, want in sub.problem.tests:
            out = await box.run(sub.code, stdin)
            verdict.passed += out.ok and out.stdout.strip() == want.strip()
        return verdict

    async def urgent(self, language: str, sub: Submission) -> Verdict | None:
        """Past the queue, with a time limit; goes to the queue when it is too slow."""
        pool = self.pools[language]
        box = await pool.borrow()  # leak: a timeout queues the submission and returns without give_back or discard
        try:
            verdict = await asyncio.wait_for(self._in(box, sub), self.per_run / 4)
        except asyncio.TimeoutError:
            sub.tries += 1
            await self.queue.put(sub)
            return None
        except SandboxDied:
            await pool.discard(box)
            return None
        await pool.give_back(box)
        return verdict

    async def reserve(self, who: str, language: str) -> None:
        """Keep a sandbox for an interactive user."""
        await self.unreserve(who)
        pool = self.pools[language]
        box = await pool.borrow()  # clean: near miss, the earlier one was given back, this one is given back by unreserve
        stale = self.reserved.pop(who, None)
        self.reserved[who] = (pool, box)
        if stale is not None:
            await stale[0].give_back(stale[1])

    async def unreserve(self, who: str) -> None:
        entry = self.reserved.pop(who, None)
        if entry is not None:
            await entry[0].give_back(entry[1])

    async def replay(self, language: str, cells: list[str]) -> int:
        """Cells of a recorded session; returns the restarts."""
        async with Repl(self.pools[language]) as repl:
            for cell in cells:
                await repl.cell(cell)
            return repl.restarts

    async def run(self, subs: list[Submission], language: str, workers: int = 4) -> list[Verdict]:
        tasks = [asyncio.create_task(self.worker(language)) for _ in range(workers)]
        for sub in subs:
            await self.queue.put(sub)
        for _ in tasks:
            await self.queue.put(None)
        await asyncio.gather(*tasks)
        return self.verdicts

    async def recheck(self, language: str, subs: list[Submission]) -> list[Verdict]:
        return [await grade(self.pools[language], s.problem, s.code) for s in subs]

    async def shutdown(self) -> None:
        for who in list(self.reserved):
            await self.unreserve(who)
        for pool in self.pools.values():
            await pool.aclose()
