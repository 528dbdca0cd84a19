"""Async request admission: concurrency permits, token budgets and sequence ids."""
import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

logger = logging.getLogger("frontend.admission")


class Overloaded(Exception):
    pass


class TokenBudget:
    """Counter of KV tokens promised to requests."""

    def __init__(self, total):
        self.total = total
        self.promised = 0
        self._room = asyncio.Condition()

    def try_promise(self, n):
        if self.promised + n > self.total:
            return False
        self.promised += n
        return True

    async def promise(self, n):
        async with self._room:
            await self._room.wait_for(lambda: self.promised + n <= self.total)
            self.promised += n

    async def refund(self, n):
        async with self._room:
            self.promised -= n
            self._room.notify_all()


class SeqIds:
    def __init__(self, count):
        self._idle = set(range(count))

    def draw(self):
        if not self._idle:
            return None
        return self._idle.pop()  # clean: returned to the caller

    def put(self, i):
        self._idle.add(i)


@dataclass
class Ticket:
    seq_id: int
    tokens: int
    tenant: str
    born: float = field(default_factory=time.monotonic)
    owns_budget: bool = True


class Admission:
    def __init__(self, max_running, max_tokens, max_seqs, per_tenant=8):
        self.running = asyncio.Semaphore(max_running)
        self.budget = TokenBudget(max_tokens)
        self.seqs = SeqIds(max_seqs)
        self.per_tenant = per_tenant
        self.tenants = {}
        self.open_tickets = 0

    def _tenant_gate(self, tenant):
        gate = self.tenants.get(tenant)
        if gate is None:
            gate = self.tenants[tenant] = asyncio.Semaphore(self.per_tenant)
        return gate

    async def enter(self, tenant, tokens):
        """Wait for room and return a ticket; `leave` takes it back."""
        await self.running.acquire()  # clean: near miss, released on both refusals and by leave()
        seq_id = self.seqs.draw()  # clean: put back when the budget is short, else in the ticket
        if seq_id is None:
            self.running.release()
            raise Overloaded("no sequence id")
        if not self.budget.try_promise(tokens):  # clean: carried by the ticket, leave() refunds it
            self.seqs.put(seq_id)
            self.running.release()
            raise Overloaded("token budget")
        ticket = Ticket(seq_id, tokens, tenant)
        self.open_tickets += 1
        return ticket

    async def leave(self, ticket):
        self.open_tickets -= 1
        self.seqs.put(ticket.seq_id)
        if ticket.owns_budget:
            await self.budget.refund(ticket.tokens)
        self.running.release()

    async def enter_embedding(self, tenant, tokens):
        """Embedding requests need no KV room, only a permit and an id."""
        await self.running.acquire()  # leak: not released when there is no sequence id
        seq_id = self.seqs.draw()  # clean: kept in the ticket
        if seq_id is None:
            raise Overloaded("no sequence id")
        ticket = Ticket(seq_id, tokens, tenant, owns_budget=False)
        self.open_tickets += 1
        return ticket

    @asynccontextmanager
    async def admitted(self, tenant, tokens):
        ticket = await self.enter(tenant, tokens)  # clean: left in finally
        try:
            yield ticket
        finally:
            await self.leave(ticket)

    async def resize(self, ticket, tokens):
        """Grow a ticket's token promise in place."""
        extra = tokens - ticket.tokens
        if extra <= 0 or not ticket.owns_budget:
            return True
        if not self.budget.try_promise(extra):  # clean: near miss, added to the ticket which refunds the whole
            return False
        ticket.tokens += extra
        return True

    async def reserve_burst(self, ticket, tokens):
        """Borrow budget for one long prefill chunk."""
        await self.budget.promise(tokens)  # leak: the refund is skipped for an expired ticket
        if time.monotonic() - ticket.born > 600:
            return False
        await asyncio.sleep(0)
        await self.budget.refund(tokens)
        return True

    async def run_if_idle(self, tenant, work, timeout=0.1):
        gate = self._tenant_gate(tenant)
        try:
            await asyncio.wait_for(gate.acquire(), timeout)  # leak: the second gate's timeout returns without releasing this one
        except asyncio.TimeoutError:
            return None
        try:
            await asyncio.wait_for(self.running.acquire(), timeout)  # clean: released in finally
        except asyncio.TimeoutError:
            return None
        try:
            return await work()
        finally:
            self.running.release()
            gate.release()


class BatchFront:
    """Turns one HTTP batch request into tickets for its prompts."""

    def __init__(self, admission, engine):
        self.admission = admission
        self.engine = engine
        self.tasks = {}

    async def submit_all(self, tenant, prompts):
        tickets = []
        try:
            for p in prompts:
                tickets.append(await self.admission.enter(tenant, len(p)))  # clean: near miss, all are left on Overloaded and after the run
        except Overloaded:
            for t in tickets:
                await self.admission.leave(t)
            raise
        try:
            return await self.engine.run(tickets, prompts)
        finally:
            for t in tickets:
                await self.admission.leave(t)

    async def submit_some(self, tenant, prompts):
        """Run as many prompts as there is room for."""
        out = []
        for p in prompts:
            try:
                ticket = await self.admission.enter(tenant, len(p))  # leak: an empty generation continues past leave()
            except Overloaded:
                out.append(None)
                continue
            text = await self.engine.generate(ticket, p)
            if not text:
                out.append("")
                continue
            out.append(text)
            await self.admission.leave(ticket)
        return out

    async def start(self, tenant, prompt, key):
        if key in self.tasks:
            return self.tasks[key]
        ticket = await self.admission.enter(tenant, len(prompt))  # clean: the task owns it and leaves in finally
        task = asyncio.create_task(self._drive(ticket, prompt, key))
        self.tasks[key] = task
        return task

    async def _drive(self, ticket, prompt, key):
        try:
            return await self.engine.generate(ticket, prompt)
        finally:
            self.tasks.pop(key, None)
            await self.admission.leave(ticket)

    async def probe(self, tenant):
        ticket = await self.admission.enter_embedding(tenant, 1)  # leak: the vector is returned and the ticket dropped
        vec = await self.engine.embed(ticket, [0])
        return sum(vec)
