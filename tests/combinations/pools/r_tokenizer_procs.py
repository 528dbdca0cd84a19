# take: await P.hire()
# give: P.lay_off(X)
# gets: value
# type: TokenizerAgency
import asyncio


class TokenizerAgency:
    """Tokenizers aren't safe to share; build at most `cap` of them, and only on demand."""

    def __init__(self, factory, cap=4):
        self._factory = factory
        self._permits = asyncio.Semaphore(cap)
        self._bench = []
        self.built = 0

    def _build(self):
        tok = self._factory()
        self.built += 1
        return tok

    async def hire(self):
        await self._permits.acquire()
        if self._bench:
            return self._bench.pop()
        try:
            return self._build()
        except BaseException:
            self._permits.release()
            raise

    def lay_off(self, tok):
        self._bench.append(tok)
        self._permits.release()
