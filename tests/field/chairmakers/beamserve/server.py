"""What the clients see."""
import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import AsyncIterator, Dict, List

from .engine import Engine


class TooMany(Exception):
    pass


@dataclass
class Ticket:
    user: str


class Admission:
    def __init__(self, total: int, per_user: int) -> None:
        self._sem = asyncio.Semaphore(total)
        self._users: Counter = Counter()
        self._per_user = per_user

    async def enter(self, user: str) -> Ticket:
        await self._sem.acquire()  # clean: near miss, released before TooMany is raised, otherwise by leave()
        if self._users[user] >= self._per_user:
            self._sem.release()
            raise TooMany(user)
        self._users[user] += 1
        return Ticket(user)  # clean: the caller leaves with it

    def leave(self, ticket: Ticket) -> None:
        self._users[ticket.user] -= 1
        self._sem.release()


class Server:
    def __init__(self, engine: Engine, admission: Admission) -> None:
        self.engine, self.admission = engine, admission
        self._ended: Dict[str, asyncio.Event] = {}

    async def pump(self) -> None:
        while True:
            for rid in self.engine.step():
                if rid in self._ended:
                    self._ended[rid].set()
            self.engine.retry_one()
            await asyncio.sleep(0)

    async def generate(self, rid: str, user: str, tokens: List[int], width: int):
        ticket = await self.admission.enter(user)  # leak: when the engine cannot start the 503 goes out without leave()
        if not self.engine.start(rid, tokens, width):
            return 503, []
        self._ended[rid] = asyncio.Event()
        try:
            await self._ended[rid].wait()
            return 200, self.engine.finish(rid)
        finally:
            del self._ended[rid]
            self.engine.finish(rid)
            self.admission.leave(ticket)

    async def stream(self, rid: str, user: str, tokens: List[int]) -> AsyncIterator[int]:
        with contextlib.ExitStack() as stack:
            ticket = await self.admission.enter(user)  # clean: the exit stack leaves also when the client stops reading
            stack.callback(self.admission.leave, ticket)
            if not self.engine.start(rid, tokens, 1):
                return
            stack.callback(self.engine.finish, rid)
            sent = len(tokens)
            while rid in self.engine.groups and not self.engine.groups[rid].finished:
                best = self.engine.groups[rid].best().tokens
                for tok in best[sent:]:
                    yield tok
                sent = len(best)
                await asyncio.sleep(0.01)

    async def batch(self, user: str, prompts: List[List[int]], width: int) -> List[List[int]]:
        """All prompts at once; the tickets are taken first so that the batch is not torn apart."""
        tickets = []
        for _ in prompts:
            tickets.append(await self.admission.enter(user))  # leak: TooMany for a later prompt leaves the tickets taken so far
        try:
            return [(await self._one(f"{user}-{i}", p, width)) for i, p in enumerate(prompts)]
        finally:
            for t in tickets:
                self.admission.leave(t)

    async def _one(self, rid: str, tokens: List[int], width: int) -> List[int]:
        while not self.engine.start(rid, tokens, width):
            await asyncio.sleep(0.05)
        self._ended[rid] = asyncio.Event()
        try:
            await self._ended[rid].wait()
            return self.engine.finish(rid)
        finally:
            del self._ended[rid]
            self.engine.finish(rid)
