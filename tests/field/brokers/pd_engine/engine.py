from __future__ import annotations

import logging

from .blocks import BlockPool
from .links import LinkUser
from .scheduler import BLOCK_SIZE, ChunkedScheduler, PrefillReq

logger = logging.getLogger(__name__)


class PrefillEngine:
    def __init__(self, pool: BlockPool, links: LinkUser, budget: int = 512) -> None:
        self.pool = pool
        self.links = links
        self.sched = ChunkedScheduler(pool, budget)
        self.reqs: dict[str, PrefillReq] = {}

    def add(self, req: PrefillReq) -> None:
        self.reqs[req.rid] = req
        self.sched.waiting.append(req)

    def _ensure_link(self, req: PrefillReq) -> bool:
        if req.link is None:
            req.link = self.links.connect(req.peer)  # leak: abort releases the blocks and forgets the link
        return req.link is not None

    def step(self) -> int:
        sent = 0
        for req in self.sched.schedule():
            if not self._ensure_link(req):
                continue
            assert req.link is not None
            if not req.link.write(req.computed * 1024):
                self.fail_over(req)
                continue
            sent += 1
            if req.computed >= len(req.tokens):
                self.finish(req)
        return sent

    def fail_over(self, req: PrefillReq) -> None:
        old = req.link
        new = self.links.connect(req.peer)  # clean: near miss, the failed link is disconnected right after the switch
        if new is None:
            return
        req.link = new
        if old is not None:
            old.failed = False
            self.links.disconnect(old)

    def finish(self, req: PrefillReq) -> None:
        for block, digest in zip(req.blocks, req.digests()):
            self.pool.publish(block, digest)
        self.sched.running.remove(req)
        self.sched.release(req)
        if req.link is not None:
            self.links.disconnect(req.link)
            req.link = None
        self.reqs.pop(req.rid, None)

    def abort(self, rid: str) -> None:
        req = self.reqs.pop(rid, None)
        if req is None:
            return
        req.aborted = True
        if req in self.sched.running:
            self.sched.running.remove(req)
            self.sched.release(req)

    def broadcast(self, peers: list[str], nbytes: int) -> int:
        ok = 0
        for peer in peers:
            link = self.links.connect(peer)  # clean: near miss, disconnected before the result decides on the break
            if link is None:
                continue
            good = link.write(nbytes)
            self.links.disconnect(link)
            if not good:
                break
            ok += 1
        return ok

    def dry_run(self, ntokens: int) -> bool:
        need = (ntokens + BLOCK_SIZE - 1) // BLOCK_SIZE
        blocks = self.pool.get_new(need)  # leak: a peerless engine returns True without giving the blocks back
        if blocks is None:
            return False
        if not self.links.leases:
            logger.info("no peer yet, skipping the link part")
            return True
        self.pool.give_back(blocks)
        return True
