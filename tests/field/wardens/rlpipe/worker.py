from __future__ import annotations

import asyncio
import logging
from typing import Optional, Sequence

from .pools import ReplayBuffer, Sandbox, SandboxPool, TokenBudget

logger = logging.getLogger(__name__)


class EpisodeWorker:
    def __init__(self, sandboxes: SandboxPool, budget: TokenBudget, buffer: ReplayBuffer) -> None:
        self.sandboxes = sandboxes
        self.budget = budget
        self.buffer = buffer
        self.sticky: dict[str, Sandbox] = {}

    async def run_episode(self, actions: Sequence[str], tokens: int) -> Optional[str]:
        if not self.budget.reserve(tokens):  # leak: the handled sandbox timeout returns None without refund
            return None
        sandbox = await self.sandboxes.claim_clean()  # clean: near miss, handed back in finally also after a timeout
        try:
            trace = [await sandbox.execute(a) for a in actions]
        except TimeoutError:
            logger.warning("episode in %s timed out", sandbox.name)
            return None
        finally:
            self.sandboxes.hand_back(sandbox)
        self.budget.refund(tokens)
        sample = "|".join(trace)
        self.buffer.add(sample)
        return sample

    async def run_cancellable(self, action: str) -> Optional[str]:
        sandbox = await self.sandboxes.claim()  # leak: the handled cancellation returns None and keeps the sandbox
        try:
            result = await sandbox.execute(action)
        except asyncio.CancelledError:
            logger.info("action %s cancelled", action)
            return None
        except TimeoutError:
            result = "timeout"
        self.sandboxes.hand_back(sandbox)
        return result

    async def turn(self, session: str, action: str) -> str:
        sandbox = self.sticky.get(session)
        if sandbox is None:
            sandbox = await self.sandboxes.claim_clean()  # clean: near miss, only for a session without one, end_session hands it back
            other = self.sticky.setdefault(session, sandbox)
            if other is not sandbox:
                self.sandboxes.hand_back(sandbox)
                sandbox = other
        try:
            return await sandbox.execute(action)
        except TimeoutError:
            return "timeout"

    def end_session(self, session: str) -> None:
        sandbox = self.sticky.pop(session, None)
        if sandbox is not None:
            self.sandboxes.hand_back(sandbox)

    def migrate(self, session: str) -> bool:
        fresh = self.sandboxes.claim_nowait()  # leak: the sandbox bound to the session before is overwritten
        if fresh is None:
            return False
        self.sticky[session] = fresh
        return True

    async def best_of(self, action: str, n: int) -> list[str]:
        claimed: list[Sandbox] = []
        for _ in range(n):
            sandbox = self.sandboxes.claim_nowait()  # clean: near miss, None stops collecting and every one collected is handed back
            if sandbox is None:
                break
            claimed.append(sandbox)
        try:
            results = await asyncio.gather(*(s.execute(action) for s in claimed), return_exceptions=True)
        finally:
            for sandbox in claimed:
                self.sandboxes.hand_back(sandbox)
        return [r for r in results if isinstance(r, str)]
