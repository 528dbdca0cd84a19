# take: await P.summon()
# give: P.dismiss(X)
# gets: value
# type: EnvWorkerBarracks
import asyncio
import itertools


class EnvWorker:
    _ids = itertools.count()

    def __init__(self, env_name):
        self.rank = next(self._ids)
        self.env_name = env_name
        self.episodes = 0

    def reset(self):
        self.episodes = 0


class EnvWorkerBarracks:
    def __init__(self, env_name, size):
        self._idle = asyncio.Queue()
        for _ in range(size):
            self._idle.put_nowait(EnvWorker(env_name))

    async def summon(self) -> EnvWorker:
        return await self._idle.get()

    def dismiss(self, worker: EnvWorker) -> None:
        worker.reset()
        self._idle.put_nowait(worker)

    @property
    def resting(self):
        return self._idle.qsize()
