"""Downloads."""
import logging

log = logging.getLogger("ingestd.fetch")


class Doc:
    def __init__(self, url, ext):
        self.url = url
        self.ext = ext


class Fetcher:
    def __init__(self, http, limits, arena):
        self.http = http
        self.limits = limits
        self.arena = arena
        self.docs = []
        self.seen = set()

    async def fetch(self, host, url):
        await self.limits.enter(host)  # clean: left in finally
        try:
            data = await self.http.get(url)
        finally:
            self.limits.leave(host)
        if not data:
            return False
        ext = self.arena.store(data)  # clean: near miss, moved into docs, which the writer empties
        if ext is None:
            return False
        self.docs.append(Doc(url, ext))
        return True

    async def fetch_unique(self, host, url):
        await self.limits.enter(host)  # leak: status other than 200 returns before leave()
        status, data = await self.http.get_status(url)
        if status != 200:
            log.info("%s: %d", url, status)
            return False
        self.limits.leave(host)
        ext = self.arena.store(data)  # leak: a body seen before returns with its extent
        if ext is None:
            return False
        digest = hash(data)
        if digest in self.seen:
            return False
        self.seen.add(digest)
        self.docs.append(Doc(url, ext))
        return True

    async def peek(self, host, url):
        if not await self.limits.enter_now(host):  # clean: left in finally
            return None
        try:
            return await self.http.head(url)
        finally:
            self.limits.leave(host)
