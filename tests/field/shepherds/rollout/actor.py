"""Actors run episodes."""
import asyncio
import logging
import random

from .envs import EnvDead

log = logging.getLogger("rollout.actor")


class Actor:
    def __init__(self, ident, envs, arena, weights, policy, refresh_every=64):
        self.ident = ident
        self.envs = envs
        self.arena = arena
        self.weights = weights
        self.policy = policy
        self.refresh_every = refresh_every
        self.episodes = 0
        self.task = None

    def start(self):
        self.task = asyncio.create_task(self.run(), name=f"actor-{self.ident}")

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def run(self):
        try:
            while True:
                try:
                    handle = await self.envs.reserve()  # leak: stop() cancels the task and the handler below returns without hand_back()
                except EnvDead:
                    await asyncio.sleep(1.0)
                    continue
                await self.episode(handle.env)
                self.envs.hand_back(handle)
                self.episodes += 1
        except asyncio.CancelledError:
            log.info("actor %d stops after %d episodes", self.ident, self.episodes)
            return

    async def _row(self):
        """Wait until the arena has a row."""
        while True:
            row = self.arena.open_row()  # clean: returned to the caller
            if row is not None:
                return row
            await asyncio.sleep(0.01 * (1 + random.random()))

    async def episode(self, env):
        version = self.weights.hold()  # leak: stop() cancels while _row() waits, which is before the try
        row = await self._row()  # clean: near miss, committed in else, discarded in except, and the learner frees what is committed
        try:
            obs = await env.reset()
            steps = 0
            while True:
                more = self.arena.write(row, obs)
                action = self.policy(self.weights.params(version), obs)
                obs, done = await env.step(action)
                steps += 1
                if done or not more:
                    break
                if steps % self.refresh_every == 0:
                    self.weights.let_go(version)
                    version = self.weights.hold()  # clean: near miss, the one it rebinds is let go in the line above
        except BaseException:
            self.arena.discard(row)
            raise
        else:
            self.arena.commit(row)
        finally:
            self.weights.let_go(version)


async def collect_demo(arena, policy, params, demos):
    """Fill rows from recorded demonstrations."""
    n = 0
    for demo in demos:
        row = arena.open_row()  # leak: a demonstration without steps goes on and the row is neither committed nor discarded
        if row is None:
            log.info("arena is full after %d demonstrations", n)
            break
        for obs in demo.steps:
            if not arena.write(row, obs):
                break
        if arena.used[row] == 0:
            continue
        arena.commit(row)
        n += 1
        await asyncio.sleep(0)
    return n
