"""Environments for rollouts. Starting one takes seconds, so they are kept and handed from actor to actor."""
import asyncio
import contextlib
import logging

log = logging.getLogger("rollout.envs")


class EnvDead(Exception):
    def __init__(self, index):
        super().__init__(f"environment {index} does not answer")
        self.index = index


class EnvHandle:
    def __init__(self, index, env):
        self.index = index
        self.env = env
        self.episodes = 0


class EnvPool:
    def __init__(self, factory, size, max_episodes=1000):
        self.factory = factory
        self.max_episodes = max_episodes
        self.size = size
        self._idle = asyncio.Queue()
        for i in range(size):
            self._idle.put_nowait(EnvHandle(i, factory(i)))

    async def reserve(self):
        handle = await self._idle.get()  # leak: EnvDead is raised with the handle taken out of the queue
        if handle.episodes >= self.max_episodes:
            # they grow fat with time
            handle.env.close()
            handle.env = self.factory(handle.index)
            handle.episodes = 0
        elif not handle.env.alive():
            log.error("environment %d is dead", handle.index)
            raise EnvDead(handle.index)
        handle.episodes += 1
        return handle

    def reserve_nowait(self):
        while True:
            try:
                handle = self._idle.get_nowait()  # clean: near miss, a dead one is made anew and queued before the loop goes on
            except asyncio.QueueEmpty:
                return None
            if handle.env.alive():
                return handle
            handle.env = self.factory(handle.index)
            self._idle.put_nowait(handle)

    def hand_back(self, handle):
        self._idle.put_nowait(handle)

    @contextlib.asynccontextmanager
    async def session(self):
        handle = await self.reserve()  # clean: handed back in finally
        try:
            yield handle
        finally:
            self.hand_back(handle)

    async def close(self):
        for _ in range(self.size):
            handle = await self._idle.get()  # clean: it is closed for good
            handle.env.close()
