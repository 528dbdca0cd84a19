"""One prompt's way from prefill to decode."""
import asyncio
import enum
import logging
from dataclasses import dataclass, field
from typing import List, Optional

from .blocks import BlockLedger, NotEnough
from .links import Link, LinkSet

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    NEW = "new"
    BOOKED = "booked"
    SENT = "sent"


@dataclass
class Ticket:
    seq: int
    src: str
    dst: str
    n_blocks: int
    phase: Phase = Phase.NEW
    blocks: List[int] = field(default_factory=list)
    link: Optional[Link] = None


class Handoff:
    def __init__(self, ledger: BlockLedger, links: LinkSet):
        self.ledger = ledger
        self.links = links

    def book(self, t: Ticket) -> bool:
        try:
            t.blocks = self.ledger.book(t.dst, t.n_blocks)  # clean: near miss, the ticket carries them, settle unbooks what was not sent
        except NotEnough as exc:
            log.info("%s", exc)
            return False
        t.phase = Phase.BOOKED
        return True

    async def send(self, t: Ticket) -> bool:
        link = await self.links.seize_live(t.src, t.dst)  # clean: yielded up in finally
        try:
            if not await link.send(t.seq, t.blocks):
                return False
            t.phase = Phase.SENT
            return True
        finally:
            await self.links.yield_up(link)

    async def send_within(self, t: Ticket, seconds: float) -> bool:
        link = await self.links.seize(t.src, t.dst)  # leak: not yielded up when the send is too slow
        try:
            ok = await asyncio.wait_for(link.send(t.seq, t.blocks), seconds)
        except asyncio.TimeoutError:
            log.warning("seq %d: link %s-%s is slow", t.seq, t.src, t.dst)
            return False
        await self.links.yield_up(link)
        if ok:
            t.phase = Phase.SENT
        return ok

    def settle(self, t: Ticket) -> None:
        """Ends a ticket in any phase."""
        if t.phase is Phase.BOOKED:
            self.ledger.unbook(t.dst, t.blocks)
            t.blocks = []
            t.phase = Phase.NEW

    def extend(self, t: Ticket, more: int) -> None:
        extra = self.ledger.book(t.dst, more)  # leak: dropped when the ticket has been sent already
        if t.phase is Phase.SENT:
            raise RuntimeError(f"seq {t.seq} has left")
        t.blocks.extend(extra)
        t.phase = Phase.BOOKED

    def retarget(self, t: Ticket, dst: str) -> bool:
        if t.phase is Phase.SENT:
            return False
        try:
            blocks = self.ledger.book(dst, t.n_blocks)  # clean: moved into the ticket in place of the old ones
        except NotEnough:
            return False
        self.settle(t)
        t.dst, t.blocks, t.phase = dst, blocks, Phase.BOOKED
        return True
