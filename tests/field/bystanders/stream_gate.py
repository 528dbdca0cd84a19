"""Admission for the streaming endpoint."""
import asyncio
import logging
import time
from dataclasses import dataclass
from typing import AsyncIterator, Dict, Optional

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GateConfig:
    max_streams: int = 128
    max_prompt_chars: int = 100_000
    tokens_per_minute: int = 600_000


class TicketOffice:
    def __init__(self, n: int) -> None:
        self._left = n
        self._issued: Dict[int, float] = {}
        self._serial = 0

    def take_ticket(self) -> Optional[int]:
        if self._left == 0:
            return None
        self._left -= 1
        self._serial += 1
        self._issued[self._serial] = time.monotonic()
        return self._serial

    def return_ticket(self, ticket: int) -> None:
        self._issued.pop(ticket)
        self._left += 1


class StreamGate:
    def __init__(self, cfg: GateConfig, engine) -> None:
        self.cfg = cfg
        self.engine = engine
        self.office = TicketOffice(cfg.max_streams)
        self.sem = asyncio.Semaphore(cfg.max_streams)
        self.tickets: Dict[str, int] = {}

    async def generate(self, rid: str, prompt: str) -> AsyncIterator[str]:
        ticket = self.office.take_ticket()  # clean: finally of the generator
        if ticket is None:
            yield "[busy]"
            return
        try:
            async for piece in self.engine.stream(rid, prompt):
                yield piece
        finally:
            self.office.return_ticket(ticket)

    async def complete(self, rid: str, prompt: str) -> Optional[str]:
        ticket = self.office.take_ticket()  # leak: the length check returns with the ticket
        if ticket is None:
            return None
        if len(prompt) > self.cfg.max_prompt_chars:
            logger.info("%s refused: prompt too long", rid)
            return None
        text = await self.engine.run(rid, prompt)
        self.office.return_ticket(ticket)
        return text

    async def embed(self, rid: str, text: str) -> Optional[list]:
        if len(text) > self.cfg.max_prompt_chars:
            return None
        ticket = self.office.take_ticket()  # clean: returned on both outcomes
        if ticket is None:
            return None
        vec = None
        try:
            vec = await self.engine.embed(rid, text)
        except ValueError:
            logger.warning("embedding of %s failed", rid)
        self.office.return_ticket(ticket)
        return vec

    async def score(self, rid: str, text: str) -> float:
        await self.sem.acquire()  # leak: the handler returns a default and keeps the permit
        try:
            s = await self.engine.score(rid, text)
        except ValueError:
            return 0.0
        self.sem.release()
        return s

    async def tokenize(self, text: str) -> list:
        async with self.sem:
            if not text:
                return []
            return await self.engine.tokenize(text)

    async def open_session(self, rid: str) -> bool:
        if rid in self.tickets:
            return True
        ticket = self.office.take_ticket()  # clean: kept under rid until close_session
        if ticket is None:
            return False
        self.tickets[rid] = ticket
        return True

    async def close_session(self, rid: str) -> None:
        ticket = self.tickets.pop(rid, None)
        if ticket is not None:
            self.office.return_ticket(ticket)

    async def migrate(self, old: str, new: str) -> bool:
        ticket = self.office.take_ticket()  # leak: a name that already has a session returns False with the fresh ticket
        if ticket is None:
            return False
        if new in self.tickets:
            return False
        self.tickets[new] = ticket
        await self.close_session(old)
        return True

    async def wait_for_ticket(self, timeout: float) -> Optional[int]:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            ticket = self.office.take_ticket()  # clean: near miss, loops only when none was issued
            if ticket is not None:
                return ticket
            await asyncio.sleep(0.01)
        return None

    async def run_batch(self, prompts: Dict[str, str]) -> Dict[str, str]:
        out: Dict[str, str] = {}
        for rid, prompt in prompts.items():
            ticket = await self.wait_for_ticket(1.0)  # clean: returned in each turn
            if ticket is None:
                break
            out[rid] = await self.engine.run(rid, prompt)
            self.office.return_ticket(ticket)
        return out

    async def drain(self, n: int) -> bool:
        """Take n tickets so that no new stream can start."""
        got = []
        while len(got) < n:
            t = await self.wait_for_ticket(5.0)  # leak: tickets collected before the timeout are forgotten
            if t is None:
                return False
            got.append(t)
        await self.engine.flush()
        for t in got:
            self.office.return_ticket(t)
        return True
