"""Rollout side of an RL trainer: inference workers and tool sandboxes are leased per episode."""
import asyncio
import dataclasses
import logging
import random
from typing import Any, AsyncIterator, Dict, List, Optional, Sequence

logger = logging.getLogger("rollout")


@dataclasses.dataclass(eq=False)
class Worker:
    rank: int
    client: Any
    weights_version: int = 0


class WorkerPool:
    def __init__(self, workers: Sequence[Worker]) -> None:
        self._queue: asyncio.Queue[Worker] = asyncio.Queue()
        for w in workers:
            self._queue.put_nowait(w)

    async def lease(self) -> Worker:
        return await self._queue.get()

    def lease_nowait(self) -> Optional[Worker]:
        try:
            return self._queue.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def give_up(self, w: Worker) -> None:
        self._queue.put_nowait(w)


class SandboxFleet:
    def __init__(self, api: Any, quota: int) -> None:
        self._api = api
        self._quota = quota
        self._up: Dict[str, Any] = {}

    async def start(self, image: str) -> Optional[str]:
        if len(self._up) >= self._quota:
            return None
        box = await self._api.create(image)
        self._up[box.id] = box
        return box.id

    async def run(self, box_id: str, code: str) -> str:
        return await self._up[box_id].exec(code)

    async def kill(self, box_id: str) -> None:
        box = self._up.pop(box_id, None)
        if box is not None:
            await box.delete()


@dataclasses.dataclass
class Episode:
    prompt: List[int]
    image: Optional[str] = None
    turns: List[str] = dataclasses.field(default_factory=list)
    box: Optional[str] = None
    reward: float = 0.0


class RolloutManager:
    def __init__(self, pool: WorkerPool, fleet: SandboxFleet, max_turns: int = 8) -> None:
        self.pool = pool
        self.fleet = fleet
        self.max_turns = max_turns
        self.version = 0
        self.benched: List[Worker] = []

    async def single_turn(self, ep: Episode) -> bool:
        w = await self.pool.lease()  # clean: near miss, given up on the timeout as well
        try:
            text = await asyncio.wait_for(w.client.generate(ep.prompt), 120)
        except asyncio.TimeoutError:
            return False
        finally:
            self.pool.give_up(w)
        ep.turns.append(text)
        return True

    async def fresh_turn(self, ep: Episode) -> bool:
        w = await self.pool.lease()  # leak: a worker with old weights makes the turn fail and never returns to the pool
        if w.weights_version < self.version:
            logger.debug("rank %d still at %d", w.rank, w.weights_version)
            return False
        ep.turns.append(await w.client.generate(ep.prompt))
        self.pool.give_up(w)
        return True

    async def lease_fresh(self, tries: int = 4) -> Optional[Worker]:
        for _ in range(tries):
            w = await self.pool.lease()  # clean: near miss, a stale one is benched and comes back with unbench, a fresh one goes to the caller
            if w.weights_version >= self.version:
                return w
            self.benched.append(w)
        return None

    def unbench(self) -> None:
        while self.benched:
            self.pool.give_up(self.benched.pop())

    async def multi_turn(self, ep: Episode) -> None:
        w = await self.lease_fresh()  # leak: no sandbox to be had ends the episode without giving the worker up
        if w is None:
            return
        if ep.image is not None:
            ep.box = await self.fleet.start(ep.image)  # clean: near miss, killed under the same condition after the turns
            if ep.box is None:
                return
        for _ in range(self.max_turns):
            text = await w.client.generate(ep.prompt)
            ep.turns.append(text)
            if text.endswith("</answer>"):
                break
            if ep.box is not None:
                ep.turns.append(await self.fleet.run(ep.box, text))
        self.pool.give_up(w)
        if ep.box is not None:
            await self.fleet.kill(ep.box)
            ep.box = None

    async def grade(self, ep: Episode, tests: List[str]) -> float:
        box = await self.fleet.start("grader")  # leak: the first failing test returns 0.0 and leaves the sandbox running
        if box is None:
            return ep.reward
        for code in tests:
            verdict = await self.fleet.run(box, ep.turns[-1] + "\n" + code)
            if verdict != "ok":
                return 0.0
        await self.fleet.kill(box)
        ep.reward = 1.0
        return ep.reward

    async def grade_partial(self, ep: Episode, tests: List[str]) -> float:
        box = await self.fleet.start("grader")  # clean: near miss, the failing test only breaks the loop
        if box is None:
            return 0.0
        passed = 0
        for code in tests:
            if await self.fleet.run(box, code) != "ok":
                break
            passed += 1
        await self.fleet.kill(box)
        return passed / max(len(tests), 1)

    async def group(self, prompt: List[int], n: int) -> List[str]:
        """n samples of the same prompt, each on a worker of its own as far as there are any."""
        leased: List[Worker] = []
        while len(leased) < n:
            w = self.pool.lease_nowait()  # clean: near miss, all of the list are given up in the finally
            if w is None:
                break
            leased.append(w)
        if not leased:
            return []
        try:
            outs = await asyncio.gather(*(w.client.generate(prompt) for w in leased), return_exceptions=True)
        finally:
            for w in leased:
                self.pool.give_up(w)
        return [o for o in outs if isinstance(o, str)]

    async def best_of(self, prompt: List[int], n: int) -> Optional[str]:
        picked = {}
        for i in range(n):
            w = self.pool.lease_nowait()  # leak: only the workers that answered are given up
            if w is None:
                break
            picked[i] = w
        answers = {}
        for i, w in picked.items():
            try:
                answers[i] = await w.client.generate(prompt)
            except ConnectionError:
                logger.warning("rank %d does not answer", w.rank)
        for i in answers:
            self.pool.give_up(picked[i])
        return max(answers.values(), key=len, default=None)

    async def sync_weights(self, version: int, total: int) -> None:
        self.version = version
        self.unbench()
        done = []
        for _ in range(total):
            w = await self.pool.lease()  # clean: collected until all are updated, then given up
            done.append(w)
            await w.client.update(version)
            w.weights_version = version
        random.shuffle(done)
        for w in done:
            self.pool.give_up(w)

    async def stream_episodes(self, prompts: List[List[int]]) -> AsyncIterator[Episode]:
        for p in prompts:
            ep = Episode(p, image="python")
            ep.box = await self.fleet.start("python")  # leak: an episode whose turn failed is skipped with its sandbox up
            if ep.box is None:
                return
            if not await self.single_turn(ep):
                continue
            await self.fleet.kill(ep.box)
            ep.box = None
            yield ep
