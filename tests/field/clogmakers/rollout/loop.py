import asyncio
import logging
import statistics

from .buffer import BufferFull
from .engines import NoEngine, SyncFailed
from .sandbox import ToolError, Toolbox

logger = logging.getLogger(__name__)


class Driver:
    def __init__(self, engines, fleet, buffer, reward, max_turns=8):
        self.engines = engines
        self.fleet = fleet
        self.buffer = buffer
        self.reward = reward
        self.max_turns = max_turns
        self.paused = {}
        self.dropped = 0

    # one trajectory

    async def episode(self, prompt):
        tools = Toolbox(self.fleet)
        messages = [{"role": "user", "content": prompt}]
        try:
            async with await self.engines.acquire() as lease:  # clean: context manager
                for _ in range(self.max_turns):
                    out = await lease.generate(messages)
                    messages.append({"role": "assistant", "content": out.text})
                    if out.tool is None:
                        break
                    try:
                        answer = await tools.run(out.tool, out.args)
                    except ToolError as exc:
                        answer = f"error: {exc}"
                    messages.append({"role": "tool", "content": answer})
            return {"messages": messages, "reward": await self.reward(messages)}
        finally:
            await tools.close()

    async def checked_episode(self, prompt, image, tests):
        """The answer is code, the reward is whether the tests pass in a fresh sandbox."""
        box = await self.fleet.start(image)  # leak: NoEngine of the acquire is caught in group(), the box was started before
        lease = await self.engines.acquire()  # clean: released in finally, nothing comes between
        try:
            out = await lease.generate([{"role": "user", "content": prompt}])
            log = await box.call(["sh", "-c", f"cat > a.py <<'E'\n{out.text}\nE\n{tests}"])
        except ToolError as exc:
            log = str(exc)
        finally:
            lease.release()
            await box.stop()
        return {"messages": [prompt, out.text], "reward": float("passed" in log)}

    # groups

    async def group(self, name, prompt, n, checked=None):
        slot = self.buffer.reserve(name)  # leak: a group with rewards all alike is of no use and returns with the slot open
        try:
            runs = [self.checked_episode(prompt, *checked) if checked else self.episode(prompt) for _ in range(n)]
            slot.samples = await asyncio.gather(*runs)
        except (NoEngine, SyncFailed) as exc:
            logger.warning("group %s: %s", name, exc)
            self.buffer.cancel(slot)
            return False
        if statistics.pstdev(slot.rewards) == 0.0:
            self.dropped += 1
            return False
        self.buffer.commit(slot)
        return True

    async def fill(self, prompts, n):
        for name, prompt in prompts:
            try:
                await self.group(name, prompt, n)
            except BufferFull:
                logger.info("buffer full at %s", name)
                return

    def import_group(self, name, samples):
        """Trajectories that were recorded elsewhere."""
        slot = self.buffer.reserve(name)  # clean: near miss, the flag decides between commit and cancel
        valid = all("reward" in s for s in samples)
        if valid:
            slot.samples = list(samples)
            self.buffer.commit(slot)
        if not valid:
            self.buffer.cancel(slot)
        return valid

    # partial rollouts

    async def start_partial(self, eid, messages, budget):
        lease = await self.engines.acquire()  # leak: discard_stale() deletes what is paused without releasing its lease
        out = await lease.generate(messages, max_tokens=budget)
        if out.finished:
            lease.release()
            return out
        self.paused[eid] = (lease, messages, self.engines.version)
        return None

    async def resume(self, eid):
        lease, messages, _ = self.paused.pop(eid)
        try:
            return await lease.generate(messages)
        finally:
            lease.release()

    def discard_stale(self, max_lag):
        stale = [e for e, (_, _, v) in self.paused.items() if self.engines.version - v > max_lag]
        for eid in stale:
            del self.paused[eid]
        return len(stale)

    # evaluation

    async def _answer(self, question):
        lease = await self.engines.acquire()  # leak: evaluate() cancels it in generate() when the time is over
        out = await lease.generate([{"role": "user", "content": question}], temperature=0.0)
        lease.release()
        return out.text

    async def evaluate(self, questions, limit):
        right = 0
        for question, expected in questions:
            try:
                text = await asyncio.wait_for(self._answer(question), limit)
            except asyncio.TimeoutError:
                logger.info("no answer within %.0f s", limit)
                continue
            right += text.strip() == expected
        return right / max(1, len(questions))

    async def spot_check(self, question):
        lease = self.engines.acquire_nowait()  # clean: None returns, else the context manager releases it
        if lease is None:
            return None
        async with lease:
            out = await asyncio.wait_for(lease.generate([question]), 10)
        return out.text

    async def warm_sandboxes(self, images):
        """Pulls the images by starting a container of each."""
        boxes = await asyncio.gather(*(self._pull(i) for i in images), return_exceptions=True)
        return sum(1 for b in boxes if b is True)

    async def _pull(self, image):
        box = await self.fleet.start(image)  # clean: stopped in finally
        try:
            await box.call(["true"], timeout=5)
            return True
        finally:
            await box.stop()
