import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from typing import Optional

from .engines import EngineSet, NoEngine, Ticket
from .router import EngineError, Router

log = logging.getLogger("router.worker")


@dataclass(eq=False)
class Partial:
    pid: int
    prompt: str
    ticket: Optional[Ticket]
    version: int
    tokens: list = field(default_factory=list)
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RolloutWorker:
    def __init__(self, router: Router, engines: EngineSet, prompts: asyncio.Queue, out: asyncio.Queue):
        self.router, self.engines = router, engines
        self.prompts, self.out = prompts, out
        self.stopping = False
        self.version = 0
        self.partials: dict[int, Partial] = {}
        self._ids = itertools.count()

    async def warm(self, n: int) -> None:
        tickets = [await self.engines.ticket() for _ in range(n)]  # leak: NoEngine on a later one loses the earlier tickets
        await asyncio.gather(*(self.router._owned(t, "", {"max_tokens": 1}) for t in tickets))

    async def run(self) -> None:
        while not self.stopping:
            try:
                t = await self.engines.ticket()  # leak: an empty queue sleeps and takes another ticket
            except NoEngine:
                await asyncio.sleep(1.0)
                continue
            try:
                prompt = self.prompts.get_nowait()
            except asyncio.QueueEmpty:
                await asyncio.sleep(0.05)
                continue
            await self._rollout(prompt, t)

    async def run_one(self) -> None:
        prompt = await self.prompts.get()
        t = await self.engines.ticket()  # clean: _rollout calls done() for its argument
        await self._rollout(prompt, t)

    async def _rollout(self, prompt: str, t: Ticket) -> None:
        try:
            reply = await self.router._post(t.engine, prompt, {"max_tokens": 2048})
            self.out.put_nowait((prompt, reply["tokens"], t.engine.version))
        except EngineError as e:
            log.warning("rollout lost: %s", e)
        finally:
            t.done()

    # Partial rollouts are interrupted by a weight update and continued later.

    async def start_partial(self, prompt: str) -> int:
        t = await self.engines.ticket()  # clean: the partial holds it until interrupt_all, migrate or finish
        p = Partial(next(self._ids), prompt, t, self.version)
        self.partials[p.pid] = p
        return p.pid

    def interrupt_all(self, version: int) -> None:
        self.version = version
        for p in self.partials.values():
            if p.ticket is not None:
                p.ticket.done()
                p.ticket = None

    async def resume(self, pid: int) -> bool:
        p = self.partials.get(pid)
        if p is None:
            return False
        async with p.lock:
            if p.closed:
                return False
            if p.ticket is None:
                p.ticket = await self.engines.ticket()  # clean: near miss, only when there is none; finish waits for the lock
        return True

    def migrate(self, pid: int) -> bool:
        p = self.partials.get(pid)
        if p is None or p.lock.locked() or p.ticket is None:
            return False
        t = self.engines.ticket_nowait()  # clean: near miss, swapped with the old one, which is done
        if t is None:
            return False
        old, p.ticket = p.ticket, t
        old.done()
        return True

    async def finish(self, pid: int) -> list:
        p = self.partials.pop(pid)
        async with p.lock:
            p.closed = True
            if p.ticket is not None:
                p.ticket.done()
                p.ticket = None
        return p.tokens

    async def close(self) -> None:
        self.stopping = True
        for pid in list(self.partials):
            await self.finish(pid)
