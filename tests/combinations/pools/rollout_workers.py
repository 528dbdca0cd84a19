# take: await P.summon()
# give: P.dismiss(X)
# gets: value
# type: RolloutCrew
import asyncio


class RolloutCrew:
    """RL rollout engines, handed to whichever coroutine asks first."""

    def __init__(self, engines):
        self._ready = asyncio.Queue()
        for e in engines:
            self._ready.put_nowait(e)

    async def summon(self):
        return await self._ready.get()

    def dismiss(self, engine):
        self._ready.put_nowait(engine)

    @property
    def num_ready(self):
        return self._ready.qsize()
