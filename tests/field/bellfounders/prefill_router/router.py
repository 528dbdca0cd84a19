"""The router's front: routes, retries, keeps the sequences that decode."""
import itertools
import logging
from typing import Dict, List, Optional

from .blocks import BlockLedger, NotEnough
from .handoff import Handoff, Phase, Ticket
from .links import LinkSet

log = logging.getLogger(__name__)

BLOCK = 16


class Router:
    def __init__(self, ledger: BlockLedger, links: LinkSet, prefill_nodes: List[str]):
        self.ledger = ledger
        self.links = links
        self.handoff = Handoff(ledger, links)
        self._rr = itertools.cycle(prefill_nodes)
        self._seq = itertools.count(1)
        self.decoding: Dict[int, Ticket] = {}

    def _ticket(self, n_tokens: int) -> Ticket:
        return Ticket(next(self._seq), next(self._rr), self.ledger.roomiest(), -(-n_tokens // BLOCK))

    async def route(self, n_tokens: int) -> Optional[int]:
        t = self._ticket(n_tokens)
        if not self.handoff.book(t):  # clean: near miss, decoding keeps the ticket that was sent, settle unbooks the others
            return None
        try:
            if await self.handoff.send(t):
                self.decoding[t.seq] = t
                return t.seq
            return None
        finally:
            self.handoff.settle(t)

    async def route_retry(self, n_tokens: int, tries: int = 3) -> Optional[int]:
        for _ in range(tries):
            t = self._ticket(n_tokens)
            if not self.handoff.book(t):  # leak: a ticket whose send failed is replaced without settle
                continue
            if await self.handoff.send_within(t, 0.5):
                self.decoding[t.seq] = t
                return t.seq
        return None

    def finished(self, seq: int) -> None:
        t = self.decoding.pop(seq, None)
        if t is not None:
            self.ledger.unbook(t.dst, t.blocks)

    async def mirror(self, seq: int, dst: str) -> bool:
        """Copies a decoding sequence's KV to a second node for a planned drain."""
        t = self.decoding[seq]
        blocks = self.ledger.book(dst, len(t.blocks))  # clean: near miss, unbooked without a link, after a failed send or for an ended sequence, else the ticket's
        link = self.links.seize_now(t.dst, dst)  # clean: yielded up in finally
        if link is None:
            self.ledger.unbook(dst, blocks)
            return False
        try:
            ok = await link.send(seq, blocks)
        finally:
            await self.links.yield_up(link)
        if not ok or self.decoding.get(seq) is not t:
            self.ledger.unbook(dst, blocks)
            return False
        self.ledger.unbook(t.dst, t.blocks)
        t.dst, t.blocks = dst, blocks
        return True

    async def probe(self, dst: str) -> bool:
        link = await self.links.any_to(dst)  # clean: yielded up in finally
        if link is None:
            return False
        try:
            return await link.send(0, [0])
        finally:
            await self.links.yield_up(link)

    def reserve_wave(self, shares: Dict[str, int]) -> int:
        """Room for a wave of migrated sequences; they come in under negative ids."""
        try:
            plan = self.ledger.book_spread(shares)  # leak: nodes that run no decode are left out of decoding with their blocks
        except NotEnough:
            return 0
        known = {t.dst for t in self.decoding.values()}
        placed = 0
        for node, blocks in plan.items():
            if node not in known:
                log.info("%s decodes nothing yet", node)
                continue
            seq = -next(self._seq)
            self.decoding[seq] = Ticket(seq, "", node, len(blocks), Phase.SENT, blocks)
            placed += 1
        return placed
