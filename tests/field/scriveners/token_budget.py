"""Per tenant token budgets of the model gateway (asyncio)."""
from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import AsyncIterator, Awaitable, Callable, Optional

log = logging.getLogger("token_budget")


@dataclass(eq=False)
class Grant:
    tenant: str
    tokens: int
    settled: bool = False


class Budget:
    """Tokens that may be in flight for one tenant. Each grant ends with settle() or cancel()."""

    def __init__(self, tenant: str, limit: int) -> None:
        self.tenant = tenant
        self._left = limit
        self._changed = asyncio.Condition()
        self.spent = 0

    async def reserve(self, tokens: int) -> Grant:
        async with self._changed:
            while self._left < tokens:
                await self._changed.wait()
            self._left -= tokens
        return Grant(self.tenant, tokens)

    def reserve_now(self, tokens: int) -> Optional[Grant]:
        if self._left < tokens:
            return None
        self._left -= tokens
        return Grant(self.tenant, tokens)

    async def settle(self, grant: Grant, used: int) -> None:
        self.spent += used
        await self.cancel(grant)

    async def cancel(self, grant: Grant) -> None:
        if grant.settled:
            return
        grant.settled = True
        async with self._changed:
            self._left += grant.tokens
            self._changed.notify_all()

    @asynccontextmanager
    async def granted(self, tokens: int) -> AsyncIterator[Grant]:
        grant = await self.reserve(tokens)  # clean: cancelled when the block ends, unless it is settled
        try:
            yield grant
        finally:
            await self.cancel(grant)


class Budgets:
    def __init__(self, limit: int) -> None:
        self._by_tenant: dict[str, Budget] = {}
        self._limit = limit

    def of(self, tenant: str) -> Budget:
        budget = self._by_tenant.get(tenant)
        if budget is None:
            budget = self._by_tenant[tenant] = Budget(tenant, self._limit)
        return budget

    async def reserve_for(self, tenant: str, prompt: str, limit: int) -> Grant:
        tokens = len(prompt.split()) + limit
        return await self.of(tenant).reserve(tokens)  # clean: handed to the caller

    async def finish(self, grant: Grant, used: int) -> None:
        await self.of(grant.tenant).settle(grant, used)


Model = Callable[[str, int], Awaitable[str]]


class Completions:
    def __init__(self, budgets: Budgets, model: Model, backup: Model) -> None:
        self.budgets = budgets
        self.model = model
        self.backup = backup
        self.cache: dict[str, str] = {}
        self.open: dict[str, Grant] = {}
        self.tasks: set[asyncio.Task] = set()

    async def complete(self, tenant: str, prompt: str, limit: int) -> str:
        grant = await self.budgets.reserve_for(tenant, prompt, limit)  # clean: settled in the finally
        text = ""
        try:
            text = await self.model(prompt, limit)
            return text
        finally:
            await self.budgets.finish(grant, len(text.split()))

    async def complete_short(self, tenant: str, prompt: str) -> str:
        async with self.budgets.of(tenant).granted(64) as grant:  # clean: near miss, cancelled by the manager
            text = await self.model(prompt, grant.tokens)
            if not text:
                return "(nothing)"
            return text

    async def classify(self, tenant: str, prompt: str, labels: list[str]) -> Optional[str]:
        budget = self.budgets.of(tenant)
        for label in labels:
            grant = budget.reserve_now(8)  # leak: the return on a match leaves the grant of that round
            if grant is None:
                return None
            answer = await self.model(f"{prompt}\nIs it {label}?", 1)
            if answer.startswith("y"):
                return label
            await budget.settle(grant, 1)
        return None

    async def rank(self, tenant: str, prompt: str, options: list[str]) -> list[str]:
        budget = self.budgets.of(tenant)
        scored: list[tuple[int, str]] = []
        for option in options:
            grant = budget.reserve_now(4)  # clean: settled before the test for an early end
            if grant is None:
                break
            answer = await self.model(f"{prompt}\n{option}", 1)
            await budget.settle(grant, 1)
            scored.append((len(answer), option))
            if answer == "stop":
                break
        return [option for _, option in sorted(scored)]

    async def open_stream(self, sid: str, tenant: str, prompt: str, limit: int) -> None:
        self.open[sid] = await self.budgets.reserve_for(tenant, prompt, limit)  # clean: settled by close_stream

    async def close_stream(self, sid: str, used: int) -> None:
        grant = self.open.pop(sid, None)
        if grant is not None:
            await self.budgets.finish(grant, used)

    async def hedge(self, tenant: str, prompt: str, limit: int) -> str:
        """Asks the backup when the model takes too long."""
        budget = self.budgets.of(tenant)
        grant = await budget.reserve(limit)  # leak: the second reservation is bound to the same name
        first = asyncio.ensure_future(self.model(prompt, limit))
        done, _ = await asyncio.wait({first}, timeout=1.5)
        if not done:
            grant = await budget.reserve(limit)  # clean: settled at the end
            text = await self.backup(prompt, limit)
            first.cancel()
        else:
            text = first.result()
        await budget.settle(grant, len(text.split()))
        return text

    async def fan_out(self, tenant: str, prompts: list[str], limit: int) -> list[str]:
        budget = self.budgets.of(tenant)
        grants = [await budget.reserve(limit) for _ in prompts]  # clean: near miss, all are cancelled in the finally
        try:
            return list(await asyncio.gather(*(self.model(p, limit) for p in prompts)))
        finally:
            for grant in grants:
                await budget.cancel(grant)

    async def vote(self, tenant: str, prompt: str, limit: int) -> str:
        budget = self.budgets.of(tenant)
        grants = [await budget.reserve(limit) for _ in range(3)]  # leak: the grant of the third vote is not cancelled
        answers = [await self.model(prompt, limit) for _ in grants]
        for grant in grants[:2]:
            await budget.cancel(grant)
        return max(answers, key=answers.count)

    def in_background(self, tenant: str, prompt: str, grant: Grant) -> None:
        """Takes over the grant."""
        task = asyncio.ensure_future(self._run_granted(tenant, prompt, grant))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run_granted(self, tenant: str, prompt: str, grant: Grant) -> None:
        text = ""
        try:
            text = await self.model(prompt, grant.tokens)
            self.cache[prompt] = text
        finally:
            await self.budgets.of(tenant).settle(grant, len(text.split()))

    async def prefill_cache(self, tenant: str, prompts: list[str]) -> int:
        started = 0
        budget = self.budgets.of(tenant)
        for prompt in prompts:
            grant = budget.reserve_now(128)  # clean: near miss, cancelled when cached, else owned by the task
            if grant is None:
                break
            if prompt in self.cache:
                await budget.cancel(grant)
                continue
            self.in_background(tenant, prompt, grant)
            started += 1
        return started

    async def affordable(self, tenant: str, tokens: int) -> bool:
        return self.budgets.of(tenant).reserve_now(tokens) is not None  # leak: a successful test keeps the tokens
