"""The decode side: receive blocks, ack, generate."""
import logging

from .links import PeerBusy, PeerGone

log = logging.getLogger(__name__)


class DecodeNode:
    def __init__(self, model, blocks, nic, book, limit=0.9):
        self.model = model
        self.blocks = blocks
        self.nic = nic
        self.book = book
        self.limit = limit
        self._expected = {}     # request id -> (blocks, peer)
        self._ready = {}
        self.cancelled = 0

    def on_offer(self, request_id, key, n, peer):
        """Answer to an offer; the data is read by the NIC in the background."""
        if request_id in self._expected or request_id in self._ready:
            return {"ok": True}
        ids = self.blocks.grab(n)  # leak: cancel() knows only expected transfers, the blocks of one that has landed stay in _ready
        if ids is None:
            return {"busy": True}
        self._expected[request_id] = (ids, peer)
        self.nic.read(key, ids, lambda ok: self._landed(request_id, ok))
        return {"ok": True}

    def _landed(self, request_id, ok):
        entry = self._expected.pop(request_id, None)
        if entry is None:
            return
        ids, peer = entry
        if not ok:
            log.warning("read for %s failed", request_id)
            self.blocks.yield_back(ids)
            return
        self._ready[request_id] = (ids, peer)

    def cancel(self, request_id):
        self.cancelled += 1
        entry = self._expected.pop(request_id, None)
        if entry is not None:
            self.blocks.yield_back(entry[0])

    def take_ready(self, request_id):
        entry = self._ready.pop(request_id, None)
        return entry if entry is not None else (None, None)

    async def generate(self, request_id, max_new):
        ids, peer = self.take_ready(request_id)  # clean: near miss, None means nothing was taken, else the finally yields back
        if ids is None:
            return None
        try:
            await self._ack(request_id, peer)
            out = []
            for _ in range(max_new):
                tok = self.model.step(ids)
                if tok == self.model.eos:
                    break
                out.append(tok)
                if len(out) % 16 == 0:
                    more = self.blocks.grab(1)  # clean: joins the list that the finally yields back
                    if more is None:
                        log.info("%s cut short", request_id)
                        break
                    ids.extend(more)
            return out
        finally:
            self.blocks.yield_back(ids)

    async def _ack(self, request_id, peer):
        try:
            link = await self.book.open(peer)  # clean: hung up in the inner finally
        except PeerGone:
            log.info("nobody to ack %s to", request_id)
            return
        try:
            await link.ask({"op": "ack", "id": request_id})
        except (PeerBusy, PeerGone):
            log.info("ack of %s not delivered", request_id)
        finally:
            self.book.hang_up(link)

    async def pull_prefix(self, peer, digest, n):
        """Asks a peer for a shared prefix. The blocks belong to the caller."""
        ids = self.blocks.grab(n)  # clean: near miss, returned or yielded back in both other ways out
        if ids is None:
            return None
        try:
            link = await self.book.open(peer)  # clean: hung up after the ask, for failures in the handler
        except PeerGone:
            self.blocks.yield_back(ids)
            return None
        try:
            reply = await link.ask({"op": "prefix", "digest": digest, "n": n})
        except (PeerBusy, PeerGone):
            self.book.hang_up(link)
            self.blocks.yield_back(ids)
            return None
        self.book.hang_up(link)
        self.nic.read_now(reply["key"], ids)
        return ids

    async def warm(self, peer, digests, n):
        """Prefixes by digest, for the engine's prefix table."""
        table = {}
        for d in digests:
            ids = await self.pull_prefix(peer, d, n)  # leak: a digest without content is skipped with its blocks
            if ids is None:
                break
            if not self.model.valid(ids):
                continue
            if d in table:
                self.blocks.yield_back(ids)
            else:
                table[d] = ids
        return table
