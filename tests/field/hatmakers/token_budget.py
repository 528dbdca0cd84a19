"""Token budgets of a language-model proxy: grants are reserved before a call and settled or refunded after it."""
from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Optional

log = logging.getLogger("proxy.budget")


@dataclass
class Grant:
    tenant: str
    tokens: int
    open: bool = True


@dataclass
class Reply:
    text: str
    used: int
    truncated: bool = False


class TokenBudget:
    def __init__(self, limits: dict[str, int]) -> None:
        self._left = dict(limits)
        self._outstanding = 0

    def reserve(self, tenant: str, tokens: int) -> Optional[Grant]:
        left = self._left.get(tenant, 0)
        if left < tokens:
            return None
        self._left[tenant] = left - tokens
        self._outstanding += 1
        return Grant(tenant, tokens)

    def settle(self, grant: Grant, used: int) -> None:
        """Charges what was used and returns the rest to the tenant."""
        if not grant.open:
            return
        grant.open = False
        self._outstanding -= 1
        self._left[grant.tenant] += max(0, grant.tokens - used)

    def refund(self, grant: Grant) -> None:
        self.settle(grant, 0)

    @property
    def outstanding(self) -> int:
        return self._outstanding


class Upstream:
    async def complete(self, prompt: str, limit: int) -> Reply:
        await asyncio.sleep(0)
        return Reply(prompt[:limit], min(len(prompt), limit), len(prompt) > limit)

    async def chunks(self, prompt: str) -> AsyncIterator[str]:
        for word in prompt.split():
            await asyncio.sleep(0)
            yield word


@dataclass
class Batch:
    ident: str
    prompts: list[str]
    grant: Grant
    done: list[Reply] = field(default_factory=list)


class Proxy:
    def __init__(self, budget: TokenBudget, upstream: Upstream) -> None:
        self.budget = budget
        self.upstream = upstream
        self.cache: dict[str, str] = {}
        self._batches: dict[str, Batch] = {}
        self._previews: dict[str, Grant] = {}

    @staticmethod
    def _digest(prompt: str) -> str:
        return hashlib.sha256(prompt.encode()).hexdigest()

    async def complete(self, tenant: str, prompt: str, limit: int = 512) -> tuple[int, str]:
        grant = self.budget.reserve(tenant, limit)  # leak: a cache hit returns with the grant open
        if grant is None:
            return 429, "budget exhausted"
        key = self._digest(prompt)
        if key in self.cache:
            log.info("cache hit for %s", tenant)
            return 200, self.cache[key]
        reply = await self.upstream.complete(prompt, limit)
        self.budget.settle(grant, reply.used)
        self.cache[key] = reply.text
        return 200, reply.text

    async def stream(self, tenant: str, prompt: str) -> AsyncIterator[str]:
        grant = self.budget.reserve(tenant, 2 * len(prompt))  # clean: settled in finally when the stream ends
        if grant is None:
            yield "[budget exhausted]"
            return
        used = 0
        try:
            async for word in self.upstream.chunks(prompt):
                used += 1
                yield word
                if used >= grant.tokens:
                    return
        finally:
            self.budget.settle(grant, used)

    async def complete_growing(self, tenant: str, prompt: str) -> Optional[str]:
        size = 128
        while size <= 4096:
            grant = self.budget.reserve(tenant, size)  # leak: a truncated reply doubles the size and drops the grant
            if grant is None:
                return None
            reply = await self.upstream.complete(prompt, size)
            if reply.truncated:
                size *= 2
                continue
            self.budget.settle(grant, reply.used)
            return reply.text
        return None

    async def complete_patient(self, tenant: str, prompt: str, attempts: int = 4) -> Optional[str]:
        for attempt in range(attempts):
            grant = self.budget.reserve(tenant, 1024)  # clean: near miss, settled before the retry is decided
            if grant is None:
                await asyncio.sleep(0.1 * attempt)
                continue
            reply = await self.upstream.complete(prompt, 1024)
            self.budget.settle(grant, reply.used)
            if reply.truncated:
                continue
            return reply.text
        return None

    async def moderate(self, tenant: str, text: str, grant: Optional[Grant] = None) -> bool:
        own = grant is None
        if own:
            grant = self.budget.reserve(tenant, 64)  # clean: near miss, refunded under the same flag
            if grant is None:
                return False
        reply = await self.upstream.complete("moderate: " + text, 64)
        verdict = "unsafe" not in reply.text
        if own:
            self.budget.refund(grant)
        return verdict

    async def translate(self, tenant: str, text: str, grant: Optional[Grant] = None) -> str:
        own = False
        if grant is None:
            grant = self.budget.reserve(tenant, len(text))  # leak: the flag is never set, nobody settles
            if grant is None:
                return text
        reply = await self.upstream.complete("translate: " + text, grant.tokens)
        if own:
            self.budget.settle(grant, reply.used)
        return reply.text

    def _reserve_pair(self, payer: str, sponsor: str, tokens: int) -> Optional[tuple[Grant, Grant]]:
        first = self.budget.reserve(payer, tokens)  # clean: rolled back where the sponsor has nothing, else handed on
        if first is None:
            return None
        second = self.budget.reserve(sponsor, tokens)  # clean: handed on in the pair
        if second is None:
            self.budget.refund(first)
            return None
        return first, second

    async def sponsored(self, payer: str, sponsor: str, prompt: str) -> Optional[str]:
        pair = self._reserve_pair(payer, sponsor, 200)  # clean: both halves are settled
        if pair is None:
            return None
        mine, theirs = pair
        reply = await self.upstream.complete(prompt, 400)
        half = reply.used // 2
        self.budget.settle(mine, half)
        self.budget.settle(theirs, reply.used - half)
        return reply.text

    async def sponsored_summary(self, payer: str, sponsor: str, prompt: str) -> Optional[str]:
        pair = self._reserve_pair(payer, sponsor, 100)  # leak: only the payer's grant is settled
        if pair is None:
            return None
        reply = await self.upstream.complete("summary: " + prompt, 200)
        self.budget.settle(pair[0], reply.used)
        return reply.text

    # batches -----------------------------------------------------------------------------------------------
    def submit_batch(self, ident: str, tenant: str, prompts: list[str]) -> bool:
        if ident in self._batches:
            return False
        grant = self.budget.reserve(tenant, 300 * len(prompts))  # leak: cancel_batch drops the batch unsettled
        if grant is None:
            return False
        self._batches[ident] = Batch(ident, list(prompts), grant)
        return True

    async def run_batch(self, ident: str) -> list[str]:
        batch = self._batches.pop(ident)
        for prompt in batch.prompts:
            batch.done.append(await self.upstream.complete(prompt, 300))
        self.budget.settle(batch.grant, sum(r.used for r in batch.done))
        return [r.text for r in batch.done]

    def cancel_batch(self, ident: str) -> bool:
        batch = self._batches.pop(ident, None)
        if batch is None:
            return False
        log.info("batch %s with %d prompts cancelled", ident, len(batch.prompts))
        return True

    # previews ----------------------------------------------------------------------------------------------
    def open_preview(self, session: str, tenant: str) -> bool:
        if session in self._previews:
            return True
        grant = self.budget.reserve(tenant, 50)  # clean: near miss, kept by session and refunded by close_preview
        if grant is None:
            return False
        self._previews[session] = grant
        return True

    def close_preview(self, session: str, used: int) -> None:
        grant = self._previews.pop(session, None)
        if grant is not None:
            self.budget.settle(grant, used)

    def shutdown(self) -> None:
        while self._previews:
            _, grant = self._previews.popitem()
            self.budget.refund(grant)
