"""The prefill side: compute the KV of a prompt, offer it, wait for the ack."""
import asyncio
import logging
import time
from dataclasses import dataclass, field

from .links import PeerBusy, PeerGone
from .regions import NoKeys, Overlap

log = logging.getLogger(__name__)

BLOCK = 16


@dataclass
class Transfer:
    request_id: str
    blocks: list
    mr: object
    peer: str
    started: float = field(default_factory=time.monotonic)


class PrefillNode:
    def __init__(self, model, blocks, regions, book, ack_timeout=10.0):
        self.model = model
        self.blocks = blocks
        self.regions = regions
        self.book = book
        self.ack_timeout = ack_timeout
        self._unacked = {}

    async def prefill(self, request_id, tokens, peer):
        """True when the peer has accepted the offer; it will ack later."""
        need = -(-len(tokens) // BLOCK)
        ids = self.blocks.grab(need)  # leak: when the peer is busy the registration is undone and the blocks forgotten
        if ids is None:
            return False
        self.model.run(tokens, ids)
        try:
            mr = self.regions.register(ids)  # leak: on_timeout() gives the blocks of an unacked transfer back and leaves them registered
        except (NoKeys, Overlap):
            self.blocks.yield_back(ids)
            return False
        try:
            await self._offer(request_id, ids, mr, peer)
        except (PeerBusy, PeerGone) as exc:
            log.info("%s: %r", request_id, exc)
            self.regions.deregister(mr)
            return False
        self._unacked[request_id] = Transfer(request_id, ids, mr, peer)
        return True

    async def _offer(self, request_id, ids, mr, peer):
        link = await self.book.open(peer)  # clean: hung up in the finally
        try:
            await link.credit()  # clean: repaid in the inner finally
            try:
                await link.ask({"op": "offer", "id": request_id, "key": mr.key, "n": len(ids)})
            finally:
                link.repay()
        finally:
            self.book.hang_up(link)

    def on_ack(self, request_id):
        t = self._unacked.pop(request_id, None)
        if t is None:
            return
        self.regions.deregister(t.mr)
        self.blocks.yield_back(t.blocks)

    def on_timeout(self):
        now = time.monotonic()
        for t in list(self._unacked.values()):
            if now - t.started > self.ack_timeout:
                log.warning("%s was not acked by %s", t.request_id, t.peer)
                del self._unacked[t.request_id]
                self.blocks.yield_back(t.blocks)

    async def probe(self, peer):
        try:
            link = await self.book.open(peer)  # leak: PeerBusy is handled together with PeerGone, after the open, without hanging up
            reply = await link.ask({"op": "load"})
        except (PeerBusy, PeerGone):
            return 1.0
        self.book.hang_up(link)
        return reply.get("load", 1.0)

    async def reaper(self, stop: asyncio.Event):
        while not stop.is_set():
            self.on_timeout()
            await asyncio.sleep(1.0)
