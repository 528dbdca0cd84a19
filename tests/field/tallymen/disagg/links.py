"""Links to peers, shared by all transfers to the same peer."""
import asyncio
import json
import logging

log = logging.getLogger(__name__)


class PeerBusy(Exception):
    pass


class PeerGone(Exception):
    pass


class Link:
    def __init__(self, peer, reader, writer, credits):
        self.peer = peer
        self.reader = reader
        self.writer = writer
        self.users = 0
        self._credits = asyncio.Semaphore(credits)
        self._turn = asyncio.Lock()

    async def credit(self):
        await self._credits.acquire()  # clean: the caller's until repay()

    def repay(self):
        self._credits.release()

    async def ask(self, msg):
        async with self._turn:
            self.writer.write(json.dumps(msg).encode() + b"\n")
            await self.writer.drain()
            line = await self.reader.readline()
        if not line:
            raise PeerGone(self.peer)
        reply = json.loads(line)
        if reply.get("busy"):
            raise PeerBusy(self.peer)
        return reply


class LinkBook:
    def __init__(self, credits=8):
        self.credits = credits
        self._links = {}
        self._mu = asyncio.Lock()

    async def open(self, peer):
        async with self._mu:
            link = self._links.get(peer)
            if link is None:
                host, port = peer.rsplit(":", 1)
                try:
                    reader, writer = await asyncio.open_connection(host, int(port))  # clean: near miss, owned by the link in the book, closed with its last user
                except OSError as exc:
                    raise PeerGone(peer) from exc
                link = self._links[peer] = Link(peer, reader, writer, self.credits)
            link.users += 1
            return link

    def hang_up(self, link):
        link.users -= 1
        if link.users == 0:
            self._links.pop(link.peer, None)
            link.writer.close()
            log.debug("link to %s closed", link.peer)
