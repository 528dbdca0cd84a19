"""asyncio micro-batcher: tickets limit what is in flight, results come through futures."""
import asyncio
import dataclasses
import logging
from typing import Any, Awaitable, Callable, Dict, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Ticket:
    number: int
    weight: int = 1


@dataclasses.dataclass
class Job:
    payload: torch.Tensor
    ticket: Ticket
    future: "asyncio.Future[torch.Tensor]"


class TicketOffice:
    def __init__(self, total: int) -> None:
        self._q: "asyncio.Queue[Ticket]" = asyncio.Queue()
        for i in range(total):
            self._q.put_nowait(Ticket(i))

    async def draw(self) -> Ticket:
        return await self._q.get()  # clean: goes to the caller

    async def draw_light(self, limit: int) -> Optional[Ticket]:
        t = await self._q.get()  # leak: a heavy ticket is taken out and forgotten
        if t.weight > limit:
            return None
        return t

    async def draw_below(self, limit: int) -> Optional[Ticket]:
        t = await self._q.get()  # clean: near miss, a heavy ticket is put back
        if t.weight > limit:
            self._q.put_nowait(t)
            return None
        return t

    def redeem(self, t: Ticket) -> None:
        self._q.put_nowait(t)


class MicroBatcher:
    def __init__(self, office: TicketOffice, fn: Callable[[torch.Tensor], torch.Tensor], max_batch: int = 8) -> None:
        self.office = office
        self.fn = fn
        self.max_batch = max_batch
        self.jobs: "asyncio.Queue[Job]" = asyncio.Queue()
        self.gate = asyncio.Semaphore(2)
        self.background: Set["asyncio.Task[Any]"] = set()
        self.parked: Dict[int, Ticket] = {}

    async def submit(self, x: torch.Tensor) -> torch.Tensor:
        ticket = await self.office.draw()  # clean: travels in the job, run_once redeems it
        fut: "asyncio.Future[torch.Tensor]" = asyncio.get_running_loop().create_future()
        await self.jobs.put(Job(x, ticket, fut))
        return await fut

    async def submit_checked(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        ticket = await self.office.draw()  # leak: an empty payload returns None with the ticket
        if x.numel() == 0:
            return None
        fut: "asyncio.Future[torch.Tensor]" = asyncio.get_running_loop().create_future()
        await self.jobs.put(Job(x, ticket, fut))
        return await fut

    async def run_once(self) -> int:
        batch: List[Job] = [await self.jobs.get()]
        while len(batch) < self.max_batch and not self.jobs.empty():
            batch.append(self.jobs.get_nowait())
        out = self.fn(torch.stack([j.payload for j in batch]))
        for j, y in zip(batch, out):
            j.future.set_result(y)
            self.office.redeem(j.ticket)
        return len(batch)

    async def direct(self, x: torch.Tensor) -> torch.Tensor:
        ticket = await self.office.draw()  # clean: finally redeems
        try:
            async with self.gate:  # clean: async with
                return self.fn(x[None])[0]
        finally:
            self.office.redeem(ticket)

    async def direct_light(self, x: torch.Tensor, limit: int) -> Optional[torch.Tensor]:
        ticket = await self.office.draw_light(limit)  # leak: a non-finite result returns None before redeem
        if ticket is None:
            return None
        y = self.fn(x[None])[0]
        if not torch.isfinite(y).all():
            return None
        self.office.redeem(ticket)
        return y

    async def gated(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        await self.gate.acquire()  # clean: near miss, released on both ways
        if x.dim() != 1:
            self.gate.release()
            return None
        y = self.fn(x[None])[0]
        self.gate.release()
        return y

    async def gated_many(self, xs: List[torch.Tensor]) -> List[torch.Tensor]:
        ys = []
        for x in xs:
            await self.gate.acquire()  # leak: wrong dimensions break out of the loop holding a permit
            if x.dim() != 1:
                break
            ys.append(self.fn(x[None])[0])
            self.gate.release()
        return ys

    async def park(self, key: int) -> bool:
        ticket = await self.office.draw()  # clean: near miss, a taken key redeems it at once, else unpark does
        if key in self.parked:
            self.office.redeem(ticket)
            return False
        self.parked[key] = ticket
        return True

    def unpark(self, key: int) -> None:
        t = self.parked.pop(key, None)
        if t is not None:
            self.office.redeem(t)

    def spawn(self, x: torch.Tensor) -> None:
        task = asyncio.ensure_future(self.direct(x))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def several(self, n: int) -> int:
        ts = await asyncio.gather(*(self.office.draw() for _ in range(n)))  # clean: all are redeemed
        total = sum(t.weight for t in ts)
        for t in ts:
            self.office.redeem(t)
        return total

    async def several_light(self, n: int, limit: int) -> int:
        ts = [await self.office.draw() for _ in range(n)]  # leak: heavy tickets are filtered out of the redeeming loop
        light = [t for t in ts if t.weight <= limit]
        for t in light:
            self.office.redeem(t)
        return len(light)

    async def retry(self, x: torch.Tensor, tries: int) -> Optional[torch.Tensor]:
        for k in range(tries):
            ticket = await self.office.draw()  # leak: the ValueError handler sleeps and draws again
            try:
                y = self.fn(x[None])[0]
            except ValueError:
                await asyncio.sleep(0.01 * k)
                continue
            self.office.redeem(ticket)
            return y
        return None

    async def attempts(self, x: torch.Tensor, tries: int) -> Optional[torch.Tensor]:
        ticket = await self.office.draw()  # clean: near miss, one ticket for all tries
        y = None
        for k in range(tries):
            try:
                y = self.fn(x[None])[0]
                break
            except ValueError:
                logger.debug("try %d failed", k)
                continue
        self.office.redeem(ticket)
        return y

    async def wait_turn(self) -> None:
        await self.office.draw()  # leak: the drawn ticket is discarded
