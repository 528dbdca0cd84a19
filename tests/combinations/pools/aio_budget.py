# take: await P.spend(n)
# give: await P.earn(n)
# gets: nothing
class Pool:
    def __init__(self, tokens):
        self.tokens = tokens
        self.changed = asyncio.Condition()

    async def spend(self, tokens):
        async with self.changed:
            await self.changed.wait_for(lambda: self.tokens >= tokens)
            self.tokens -= tokens

    async def earn(self, tokens):
        async with self.changed:
            self.tokens += tokens
            self.changed.notify_all()
