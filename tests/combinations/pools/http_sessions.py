# take: await P.check_out()
# give: P.check_in(X)
# gets: value
# type: UpstreamSessions
import asyncio
import itertools
import logging

log = logging.getLogger("router.sessions")


class UpstreamSession:
    _ids = itertools.count(1)

    def __init__(self, base_url):
        self.base_url = base_url
        self.id = next(self._ids)
        self.served = 0


class UpstreamSessions:
    """Router side sessions to an upstream engine, handed around through an asyncio queue."""

    def __init__(self, base_url, size=4, recycle_after=1000):
        self.base_url = base_url
        self.recycle_after = recycle_after
        self._idle = asyncio.Queue()
        for _ in range(size):
            self._idle.put_nowait(UpstreamSession(base_url))

    async def check_out(self):
        session = await self._idle.get()
        session.served += 1
        return session

    def check_in(self, session):
        if session.served >= self.recycle_after:
            log.info("session %d is worn out, replacing", session.id)
            session = UpstreamSession(self.base_url)
        self._idle.put_nowait(session)
