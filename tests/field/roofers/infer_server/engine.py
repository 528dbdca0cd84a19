from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from typing import Any, Optional, Protocol

from .request import Request
from .slots import SlotManager

log = logging.getLogger(__name__)


class Model(Protocol):
    async def prefill(self, slot: int, prompt: list[int]) -> int: ...

    async def decode(self, slot: int) -> int: ...

    async def score(self, slot: int, prompt: list[int]) -> float: ...


class Engine:
    def __init__(self, slots: SlotManager, model: Model) -> None:
        self.slots = slots
        self.model = model
        self.waiting: deque[Request] = deque()
        self.urgent: list[tuple[int, str, Request]] = []
        self.running: dict[str, Request] = {}
        self._prefills: dict[str, tuple[asyncio.Task, int]] = {}
        self._drafts: set[asyncio.Task] = set()

    def admit(self) -> int:
        n = 0
        while self.waiting:
            slot = self.slots.try_lease()  # leak: a request cancelled while it waited is skipped with the slot in hand
            if slot is None:
                break
            req = self.waiting.popleft()
            if req.cancelled:
                log.debug("%s was cancelled in the queue", req.rid)
                continue
            req.attach(slot)
            self.running[req.rid] = req
            n += 1
        return n

    def admit_urgent(self) -> int:
        n = 0
        slot: Optional[int] = None
        while self.urgent:
            if slot is None:
                slot = self.slots.try_lease()  # clean: near miss, kept over cancelled requests and given back after the loop
            if slot is None:
                break
            _, _, req = heapq.heappop(self.urgent)
            if req.cancelled:
                continue
            req.attach(slot)
            self.running[req.rid] = req
            slot = None
            n += 1
        if slot is not None:
            self.slots.give_back(slot)
        return n

    def retire(self, req: Request) -> None:
        slot = req.detach()
        if slot is not None:
            self.slots.give_back(slot)

    async def step(self) -> list[Request]:
        done = []
        for rid, req in list(self.running.items()):
            if not req.finished:
                req.output.append(await self.model.decode(req.slot))
            if req.finished:
                self.running.pop(rid, None)
                self.retire(req)
                done.append(req)
        return done

    def abort(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            req.cancelled = True
            self.retire(req)

    async def score(self, prompt: list[int], timeout: float) -> Optional[float]:
        slot = await self.slots.lease()  # leak: the timeout is caught and returns without the slot going back
        try:
            value = await asyncio.wait_for(self.model.score(slot, prompt), timeout)
        except asyncio.TimeoutError:
            log.warning("score timed out after %.1fs", timeout)
            return None
        self.slots.give_back(slot)
        return value

    async def embed(self, prompt: list[int]) -> Any:
        slot = await self.slots.lease()  # clean: finally
        try:
            return await self.model.prefill(slot, prompt)
        finally:
            self.slots.give_back(slot)

    async def _draft(self, slot: int, prompt: list[int], out: list[int]) -> None:
        try:
            out.append(await self.model.prefill(slot, prompt))
            out.append(await self.model.decode(slot))
        finally:
            self.slots.give_back(slot)

    def start_draft(self, prompt: list[int], out: list[int]) -> bool:
        slot = self.slots.try_lease()  # clean: near miss, the task gives it back
        if slot is None:
            return False
        task = asyncio.create_task(self._draft(slot, prompt, out))
        self._drafts.add(task)
        task.add_done_callback(self._drafts.discard)
        return True

    def start_prefill(self, req: Request) -> bool:
        if req.rid in self._prefills:
            return True
        slot = self.slots.try_lease()  # leak: collect takes it out of the table and drops it for cancelled requests
        if slot is None:
            return False
        self._prefills[req.rid] = (asyncio.create_task(self.model.prefill(slot, req.prompt)), slot)
        return True

    async def collect(self, req: Request) -> bool:
        task, slot = self._prefills.pop(req.rid)
        first = await task
        if req.cancelled:
            return False
        req.output.append(first)
        req.attach(slot)
        self.running[req.rid] = req
        return True
