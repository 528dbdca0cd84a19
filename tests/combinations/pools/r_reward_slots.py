# take: await P.bench()
# give: await P.unbench(X)
# gets: value
# type: JudgePanel
import asyncio


class JudgePanel:
    """Named reward-model endpoints with so many concurrent gradings each."""

    def __init__(self, widths):
        self._spare = dict(widths)
        self._widths = dict(widths)
        self._turn = asyncio.Condition()

    def _roomiest(self):
        name = max(self._spare, key=self._spare.get)
        return name if self._spare[name] > 0 else None

    async def bench(self):
        async with self._turn:
            while (name := self._roomiest()) is None:
                await self._turn.wait()
            self._spare[name] -= 1
            return name

    async def unbench(self, name):
        async with self._turn:
            if self._spare[name] >= self._widths[name]:
                raise RuntimeError(f"judge {name} has nothing to finish")
            self._spare[name] += 1
            self._turn.notify(1)
