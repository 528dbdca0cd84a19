from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

import torch

from .slots import AdapterRefs, SeqSlots


@dataclass
class Live:
    rid: str
    prompt: torch.Tensor
    limit: int
    adapter: Optional[str] = None
    row: Optional[int] = None
    out: List[int] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    def __init__(self, slots: SeqSlots, adapters: AdapterRefs, step: Callable[[torch.Tensor, List[int]], List[int]], eos: int):
        self.slots = slots
        self.adapters = adapters
        self.step = step
        self.eos = eos
        self.live: Dict[str, Live] = {}

    async def join(self, req: Live) -> bool:
        if req.rid in self.live:
            return False
        if req.adapter is not None and self.adapters.hold(req.adapter) is None:  # clean: near miss, retire() lets go where the request names an adapter
            return False
        self.live[req.rid] = req
        req.row = self.slots.vacancy_now()  # clean: on req in live, retire() vacates it
        if req.row is None:
            del self.live[req.rid]
            if req.adapter is not None:
                self.adapters.let_go(req.adapter)
            return False
        self.slots.state[req.row].copy_(req.prompt)
        return True

    async def join_waiting(self, req: Live) -> bool:
        if req.rid in self.live:
            return False
        row = await self.slots.vacancy()  # leak: an unknown adapter refuses the request after the row was taken
        if req.adapter is not None and self.adapters.hold(req.adapter) is None:  # clean: retire() lets go of it
            return False
        req.row = row
        self.slots.state[row].copy_(req.prompt)
        self.live[req.rid] = req
        return True

    async def retire(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        if req.adapter is not None:
            self.adapters.let_go(req.adapter)
        row, req.row = req.row, None
        if row is not None:
            await self.slots.vacate(row)
        req.finished.set()

    async def tick(self) -> int:
        running = [r for r in self.live.values() if r.row is not None]
        if not running:
            return 0
        tokens = self.step(self.slots.state, [r.row for r in running])
        for req, tok in zip(running, tokens):
            req.out.append(tok)
            if tok == self.eos or len(req.out) >= req.limit:
                await self.retire(req.rid)
        return len(running)

    def compare_adapters(self, left: str, right: str) -> Optional[float]:
        a = self.adapters.hold(left)  # leak: held for good when the shapes differ
        if a is None:
            return None
        b = self.adapters.hold(right)  # leak: held for good when the shapes differ
        if b is None:
            self.adapters.let_go(left)
            return None
        if a.shape != b.shape:
            return None
        dist = float((a - b).norm())
        self.adapters.let_go(right)
        self.adapters.let_go(left)
        return dist
