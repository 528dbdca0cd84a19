from __future__ import annotations

import asyncio
import itertools
import logging
from typing import AsyncIterator, Dict, List, Optional

import torch

from .engine import Engine, Live
from .slots import SeqSlots

log = logging.getLogger("inferd.service")


class Service:
    def __init__(self, engine: Engine, slots: SeqSlots):
        self.engine = engine
        self.slots = slots
        self._n = itertools.count()
        self.reserved: Dict[str, int] = {}

    async def generate(self, prompt: torch.Tensor, limit: int, adapter: Optional[str] = None) -> Optional[List[int]]:
        req = Live(f"r{next(self._n)}", prompt, limit, adapter)
        if not await self.engine.join(req):  # clean: retired in finally, nothing is held on False
            return None
        try:
            await req.finished.wait()
            return req.out
        finally:
            await self.engine.retire(req.rid)

    async def generate_within(self, prompt: torch.Tensor, limit: int, seconds: float) -> Optional[List[int]]:
        req = Live(f"t{next(self._n)}", prompt, 1 << 30 if limit < 0 else limit)
        if not await self.engine.join(req):  # clean: near miss, both the time-out and the normal way end in retire()
            return None
        try:
            await asyncio.wait_for(req.finished.wait(), seconds)
        except asyncio.TimeoutError:
            log.info("%s timed out with %d tokens", req.rid, len(req.out))
        finally:
            await self.engine.retire(req.rid)
        return req.out

    async def embed(self, prompt: torch.Tensor) -> torch.Tensor:
        async with self.slots.seated() as row:  # clean: async with
            self.slots.state[row].copy_(prompt)
            return self.slots.state[row].clone()

    async def embed_many(self, prompts: List[torch.Tensor]) -> List[torch.Tensor]:
        out = []
        for p in prompts:
            row = await self.slots.vacancy()  # leak: a prompt of the wrong width is skipped with its row
            if p.numel() != self.slots.state.shape[1]:
                log.warning("prompt of %d values", p.numel())
                continue
            self.slots.state[row].copy_(p)
            out.append(self.slots.state[row].clone())
            await self.slots.vacate(row)
        return out

    async def reserve(self, client: str) -> None:
        self.reserved[client] = await self.slots.vacancy()  # leak: a client that reserves twice overwrites its first row

    async def unreserve(self, client: str) -> None:
        row = self.reserved.pop(client, None)
        if row is not None:
            await self.slots.vacate(row)

    async def stream_state(self, prompt: torch.Tensor, steps: int) -> AsyncIterator[torch.Tensor]:
        row = await self.slots.vacancy()  # leak: a listener that goes away at the yield never reaches vacate()
        self.slots.state[row].copy_(prompt)
        for _ in range(steps):
            self.engine.step(self.slots.state, [row])
            yield self.slots.state[row].clone()
        await self.slots.vacate(row)
