import asyncio
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from .permits import ReplicaRouter
from .sandbox import Sandbox, SandboxFarm


@dataclass
class Episode:
    eid: str
    prompt: str
    max_tokens: int
    sandbox: Optional[Sandbox] = None
    url: Optional[str] = None
    charged: int = 0
    turns: List[str] = field(default_factory=list)
    reward: Optional[float] = None


class Collector:
    def __init__(self, llm: Any, router: ReplicaRouter, farm: SandboxFarm, max_turns: int = 8):
        self.llm = llm
        self.router = router
        self.farm = farm
        self.max_turns = max_turns
        self.live: Dict[str, Episode] = {}

    async def start(self, ep: Episode) -> bool:
        ep.sandbox = await self.farm.checkout_healthy(3)  # clean: near miss, checked in when no replica is free, otherwise by end
        if ep.sandbox is None:
            return False
        ep.url = await self.router.pick_charged(ep.max_tokens)  # clean: near miss, end gives it up with the amount kept in charged
        if ep.url is None:
            sb, ep.sandbox = ep.sandbox, None
            await self.farm.checkin(sb)
            return False
        ep.charged = ep.max_tokens
        self.live[ep.eid] = ep
        return True

    async def turn(self, ep: Episode) -> bool:
        text = await self.llm.generate(ep.url, ep.prompt, ep.turns)
        ep.turns.append(text)
        if "</code>" not in text or len(ep.turns) >= self.max_turns:
            return False
        try:
            ep.turns.append(await ep.sandbox.run(text, 20.0))
        except asyncio.TimeoutError:
            ep.turns.append("timeout")
        return True

    async def end(self, ep: Episode) -> None:
        self.live.pop(ep.eid, None)
        if ep.sandbox is not None:
            sb, ep.sandbox = ep.sandbox, None
            await self.farm.checkin(sb)
        if ep.url is not None:
            url, ep.url = ep.url, None
            await self.router.give_up(url, ep.charged)

    async def rollout(self, ep: Episode) -> Episode:
        if not await self.start(ep):  # clean: near miss, a failed start holds nothing and a started episode is ended in the finally
            return ep
        try:
            while await self.turn(ep):
                pass
            ep.reward = await self.judge(ep)
        finally:
            await self.end(ep)
        return ep

    async def judge(self, ep: Episode) -> Optional[float]:
        async with self.router.seat() as url:  # clean: near miss, leaving early goes through the context manager
            if url is None or not ep.turns:
                return None
            return await self.llm.score(url, ep.prompt, ep.turns)

    async def judge_pair(self, a: Episode, b: Episode) -> Optional[float]:
        ua = self.router.pick()  # leak: not unpicked when no second replica is to be had
        if ua is None:
            return None
        ub = self.router.pick()  # clean: near miss, both are unpicked after the gather
        if ub is None:
            return None
        sa, sb = await asyncio.gather(
            self.llm.score(ua, a.prompt, a.turns), self.llm.score(ub, b.prompt, b.turns)
        )
        self.router.unpick(ua)
        self.router.unpick(ub)
        return sa - sb

    async def summarize(self, ep: Episode) -> str:
        url = next(iter(self.router.budgets))
        n = await self.router.budgets[url].charge(ep.max_tokens)  # leak: an episode without turns returns its prompt and no refund
        if not ep.turns:
            return ep.prompt
        out = await self.llm.generate(url, "summarize", ep.turns)
        await self.router.budgets[url].refund(n)
        return out

    async def verify(self, ep: Episode, tests: List[str]) -> float:
        sb = await self.farm.checkout_fresh(3)  # leak: the timeout handler returns 0.0 with the sandbox out
        if sb is None:
            return 0.0
        passed = 0
        for t in tests:
            try:
                passed += "ok" in await sb.run(t, 5.0)
            except asyncio.TimeoutError:
                return 0.0
        await self.farm.checkin(sb)
        return passed / max(len(tests), 1)

    async def replay(self, ep: Episode) -> bool:
        sb = await self.farm.checkout_healthy(1)  # clean: near miss, quarantined after a timeout and checked in otherwise
        if sb is None:
            return False
        try:
            for t in ep.turns:
                await sb.run(t, 5.0)
        except asyncio.TimeoutError:
            self.farm.quarantine(sb)
            return False
        await self.farm.checkin(sb)
        return True

    async def migrate(self, ep: Episode) -> bool:
        url = await self.router.pick_charged(ep.max_tokens)  # leak: the episode is moved over and its former replica is never given up
        if url is None:
            return False
        await self.llm.warm(url, ep.prompt, ep.turns)
        ep.url = url
        ep.charged = ep.max_tokens
        return True

    async def drain(self) -> None:
        for ep in list(self.live.values()):
            await self.end(ep)
        await self.farm.heal()
