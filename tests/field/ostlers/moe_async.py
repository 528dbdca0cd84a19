"""Expert-parallel serving front: token buffers, a capacity gate and the dispatch tasks."""
from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional, Protocol

import torch

log = logging.getLogger("moe")


class ExpertClient(Protocol):
    async def run(self, expert: int, tokens: torch.Tensor) -> torch.Tensor: ...

    async def ping(self, expert: int) -> bool: ...


class TokenBuffers:
    """Buffers for the tokens of one expert call."""

    def __init__(self, count: int, capacity: int, hidden: int):
        self._idle: "asyncio.LifoQueue[torch.Tensor]" = asyncio.LifoQueue()
        for _ in range(count):
            self._idle.put_nowait(torch.empty(capacity, hidden))

    async def obtain(self) -> torch.Tensor:
        return await self._idle.get()

    def obtain_now(self) -> Optional[torch.Tensor]:
        return None if self._idle.empty() else self._idle.get_nowait()

    def relinquish(self, buf: torch.Tensor) -> None:
        self._idle.put_nowait(buf)

    @contextlib.asynccontextmanager
    async def using(self) -> AsyncIterator[torch.Tensor]:
        buf = await self.obtain()  # clean: relinquished in finally
        try:
            yield buf
        finally:
            self.relinquish(buf)


class CapacityGate:
    """At most `limit` tokens under way per expert."""

    def __init__(self, limit: int):
        self.limit = limit
        self._load: Dict[int, int] = defaultdict(int)
        self._changed = asyncio.Condition()

    async def enter(self, expert: int, tokens: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._load[expert] + tokens <= self.limit)
            self._load[expert] += tokens

    def try_enter(self, expert: int, tokens: int) -> bool:
        if self._load[expert] + tokens > self.limit:
            return False
        self._load[expert] += tokens
        return True

    async def leave(self, expert: int, tokens: int) -> None:
        async with self._changed:
            self._load[expert] -= tokens
            self._changed.notify_all()


@dataclass
class DispatchRequest:
    rid: int
    tokens: torch.Tensor
    routes: Dict[int, torch.Tensor]
    staged: Dict[int, torch.Tensor] = field(default_factory=dict)
    spill: Optional[torch.Tensor] = None


class Dispatcher:
    def __init__(self, client: ExpertClient, buffers: TokenBuffers, gate: CapacityGate):
        self.client = client
        self.buffers = buffers
        self.gate = gate
        self._tasks: Dict[int, "asyncio.Task[torch.Tensor]"] = {}
        self.dropped = 0

    async def _call(self, expert: int, buf: torch.Tensor, count: int) -> torch.Tensor:
        out = await self.client.run(expert, buf[:count])
        return out.clone()

    async def forward(self, tokens: torch.Tensor, routes: Dict[int, torch.Tensor]) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert, rows in routes.items():
            if rows.numel() == 0:
                continue
            await self.gate.enter(expert, rows.numel())  # clean: near miss, left in finally
            try:
                async with self.buffers.using() as buf:  # clean: the context manager relinquishes
                    buf[: rows.numel()].copy_(tokens[rows])
                    result[rows] += await self._call(expert, buf, rows.numel())
            finally:
                await self.gate.leave(expert, rows.numel())
        return result

    async def forward_dropping(self, tokens: torch.Tensor, routes: Dict[int, torch.Tensor]) -> torch.Tensor:
        """Tokens over an expert's capacity pass through unchanged."""
        result = tokens.clone()
        for expert, rows in routes.items():
            if not self.gate.try_enter(expert, rows.numel()):  # leak: continue without a buffer never leaves
                self.dropped += rows.numel()
                continue
            buf = self.buffers.obtain_now()  # clean: None or relinquished
            if buf is None:
                self.dropped += rows.numel()
                continue
            buf[: rows.numel()].copy_(tokens[rows])
            result[rows] = await self._call(expert, buf, rows.numel())
            self.buffers.relinquish(buf)
            await self.gate.leave(expert, rows.numel())
        return result

    async def stage(self, req: DispatchRequest) -> None:
        for expert, rows in req.routes.items():
            buf = await self.buffers.obtain()  # clean: near miss, in staged, see complete and reject
            buf[: rows.numel()].copy_(req.tokens[rows])
            req.staged[expert] = buf
        if len(req.routes) > 4:
            req.spill = await self.buffers.obtain()  # leak: complete and reject only walk staged

    async def complete(self, req: DispatchRequest) -> torch.Tensor:
        out = torch.zeros_like(req.tokens)
        for expert, rows in req.routes.items():
            buf = req.staged.pop(expert)
            out[rows] += await self._call(expert, buf, rows.numel())
            self.buffers.relinquish(buf)
        return out

    def reject(self, req: DispatchRequest) -> None:
        while req.staged:
            _, buf = req.staged.popitem()
            self.buffers.relinquish(buf)
        self.dropped += req.tokens.shape[0]

    async def launch(self, rid: int, expert: int, tokens: torch.Tensor) -> None:
        buf = await self.buffers.obtain()  # clean: near miss, relinquished by the task's done callback
        buf[: tokens.shape[0]].copy_(tokens)
        task = asyncio.create_task(self._call(expert, buf, tokens.shape[0]))
        task.add_done_callback(lambda _t: self.buffers.relinquish(buf))
        self._tasks[rid] = task

    async def launch_logged(self, rid: int, expert: int, tokens: torch.Tensor) -> None:
        buf = await self.buffers.obtain()  # leak: the done callback only logs, nothing else has the buffer
        count = tokens.shape[0]
        buf[:count].copy_(tokens)
        task = asyncio.create_task(self._call(expert, buf, count))
        task.add_done_callback(lambda t: log.debug("request %d cancelled=%s", rid, t.cancelled()))
        self._tasks[rid] = task

    async def join(self, rid: int) -> torch.Tensor:
        return await self._tasks.pop(rid)

    async def probe(self, expert: int, attempts: int) -> bool:
        """Whether an expert answers; one token of its capacity is used per attempt."""
        for attempt in range(attempts):
            await self.gate.enter(expert, 1)  # leak: an unanswered attempt goes round without leave
            if await self.client.ping(expert):
                await self.gate.leave(expert, 1)
                return True
            await asyncio.sleep(0.05 * (attempt + 1))
        return False

    async def _combined(self, tokens: torch.Tensor, experts: List[int]) -> torch.Tensor:
        """Mean over experts in a buffer that the caller relinquishes."""
        acc = await self.buffers.obtain()  # clean: returned to the caller
        acc[: tokens.shape[0]].zero_()
        async with self.buffers.using() as tmp:  # clean: the context manager relinquishes
            tmp[: tokens.shape[0]].copy_(tokens)
            for expert in experts:
                acc[: tokens.shape[0]] += await self._call(expert, tmp, tokens.shape[0]) / len(experts)
        return acc

    async def shared_experts(self, tokens: torch.Tensor, experts: List[int]) -> torch.Tensor:
        acc = await self._combined(tokens, experts)  # leak: the rows are cloned out and the buffer dropped
        return acc[: tokens.shape[0]].clone() + tokens

    async def with_deadline(
        self, expert: int, tokens: torch.Tensor, seconds: float
    ) -> Optional[torch.Tensor]:
        buf = await self.buffers.obtain()  # leak: relinquished after success, not when the call timed out
        buf[: tokens.shape[0]].copy_(tokens)
        try:
            out = await asyncio.wait_for(self._call(expert, buf, tokens.shape[0]), seconds)
        except asyncio.TimeoutError:
            log.warning("expert %d timed out after %.2fs", expert, seconds)
            return None
        self.buffers.relinquish(buf)
        return out
