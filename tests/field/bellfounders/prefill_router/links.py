"""Links between prefill and decode nodes. One link carries one transfer at a time."""
import asyncio
import random
from typing import Dict, List, Optional, Tuple


class Link:
    def __init__(self, src: str, dst: str):
        self.src, self.dst = src, dst
        self.up = True

    async def send(self, seq: int, blocks: List[int]) -> bool:
        await asyncio.sleep(0)
        return self.up and bool(blocks)


class LinkSet:
    def __init__(self, pairs: List[Tuple[str, str]], width: int = 2):
        self._idle: Dict[Tuple[str, str], List[Link]] = {p: [Link(*p) for _ in range(width)] for p in pairs}
        self._cond = asyncio.Condition()

    async def seize(self, src: str, dst: str) -> Link:
        async with self._cond:
            idle = self._idle[(src, dst)]
            await self._cond.wait_for(lambda: idle)
            return idle.pop()  # clean: handed to the caller

    def seize_now(self, src: str, dst: str) -> Optional[Link]:
        idle = self._idle.get((src, dst))
        return idle.pop() if idle else None  # clean: handed to the caller

    async def yield_up(self, link: Link) -> None:
        async with self._cond:
            self._idle[(link.src, link.dst)].append(link)
            self._cond.notify_all()

    async def seize_live(self, src: str, dst: str) -> Link:
        while True:
            link = await self.seize(src, dst)  # clean: near miss, a link that is down is replaced by a new one in the idle list
            if link.up:
                return link
            await self.yield_up(Link(src, dst))

    async def any_to(self, dst: str) -> Optional[Link]:
        sources = [s for s, d in self._idle if d == dst]
        random.shuffle(sources)
        for src in sources:
            link = self.seize_now(src, dst)  # leak: a link that is down is passed over and never put back
            if link is not None and link.up:
                return link
        return None
