"""asyncio front of a prefill engine: token budget, prompt buffers and request tasks."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import AsyncIterator, Awaitable, Callable, Optional

import torch

logger = logging.getLogger(__name__)


class PromptBuffers:
    """Long tensors for prompt ids, handed out through an asyncio.Queue."""

    def __init__(self, count: int, max_tokens: int) -> None:
        self._q: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        for _ in range(count):
            self._q.put_nowait(torch.zeros(max_tokens, dtype=torch.long))

    async def get_buffer(self) -> torch.Tensor:
        return await self._q.get()

    def get_buffer_nowait(self) -> Optional[torch.Tensor]:
        try:
            return self._q.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def recycle(self, t: torch.Tensor) -> None:
        self._q.put_nowait(t)


class TokenBudget:
    """Counts tokens that are being prefilled."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self._changed = asyncio.Condition()

    async def reserve(self, n: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self.left >= n)
            self.left -= n
        return n

    def try_reserve(self, n: int) -> bool:
        if self.left < n:
            return False
        self.left -= n
        return True

    async def refund(self, n: int) -> None:
        async with self._changed:
            self.left += n
            self._changed.notify_all()


@dataclass
class PrefillRequest:
    rid: str
    ids: list[int]
    buf: Optional[torch.Tensor] = None
    reserved: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


Model = Callable[[torch.Tensor], Awaitable[torch.Tensor]]


class PrefillFront:
    def __init__(self, model: Model, buffers: PromptBuffers, budget: TokenBudget, max_len: int) -> None:
        self.model = model
        self.buffers = buffers
        self.budget = budget
        self.max_len = max_len
        self.live: dict[str, PrefillRequest] = {}
        self.inbox: asyncio.Queue[PrefillRequest] = asyncio.Queue()
        self.slots = asyncio.Semaphore(4)
        self.tasks: set[asyncio.Task] = set()

    async def _prepare(self, req: PrefillRequest) -> None:
        """Fills in req.buf and req.reserved; _teardown() undoes both."""
        req.reserved = await self.budget.reserve(len(req.ids))  # clean: near miss, kept on the request for _teardown()
        req.buf = await self.buffers.get_buffer()  # clean: kept on the request for _teardown()
        req.buf[: len(req.ids)] = torch.as_tensor(req.ids)

    async def _teardown(self, req: PrefillRequest) -> None:
        if req.buf is not None:
            self.buffers.recycle(req.buf)
            req.buf = None
        if req.reserved:
            n, req.reserved = req.reserved, 0
            await self.budget.refund(n)
        self.live.pop(req.rid, None)
        req.done.set()

    async def handle(self, req: PrefillRequest) -> torch.Tensor:
        self.live[req.rid] = req
        try:
            await self._prepare(req)  # clean: torn down in finally
            return await self.model(req.buf[: len(req.ids)])
        finally:
            await self._teardown(req)

    async def embed(self, ids: list[int]) -> Optional[torch.Tensor]:
        buf = await self.buffers.get_buffer()  # leak: not recycled when ids is longer than max_len
        if len(ids) > self.max_len:
            logger.warning("%d ids are over the limit", len(ids))
            return None
        try:
            buf[: len(ids)] = torch.as_tensor(ids)
            return await self.model(buf[: len(ids)])
        finally:
            self.buffers.recycle(buf)

    async def with_timeout(self, ids: list[int], seconds: float) -> Optional[torch.Tensor]:
        n = await self.budget.reserve(len(ids))  # leak: a timeout returns None without the refund
        try:
            result = await asyncio.wait_for(self.model(torch.as_tensor(ids)), seconds)
        except asyncio.TimeoutError:
            return None
        await self.budget.refund(n)
        return result

    async def with_deadline(self, ids: list[int], seconds: float) -> Optional[torch.Tensor]:
        n = await self.budget.reserve(len(ids))  # clean: refunded after both outcomes
        result: Optional[torch.Tensor] = None
        try:
            result = await asyncio.wait_for(self.model(torch.as_tensor(ids)), seconds)
        except asyncio.TimeoutError:
            logger.info("deadline passed")
        finally:
            await self.budget.refund(n)
        return result

    # ---- background prefill ------------------------------------------------

    async def spawn(self, req: PrefillRequest) -> asyncio.Task:
        await self.slots.acquire()  # clean: near miss, the task's done callback releases
        task = asyncio.create_task(self.handle(req))
        self.tasks.add(task)
        task.add_done_callback(self._spawned_done)
        return task

    def _spawned_done(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        self.slots.release()

    async def spawn_unless_live(self, req: PrefillRequest) -> Optional[asyncio.Task]:
        await self.slots.acquire()  # leak: a request that is live already returns None with the slot
        if req.rid in self.live:
            return None
        task = asyncio.create_task(self.handle(req))
        self.tasks.add(task)
        task.add_done_callback(self._spawned_done)
        return task

    async def enqueue(self, rid: str, ids: list[int]) -> bool:
        buf = self.buffers.get_buffer_nowait()  # clean: moves into the inbox with its request
        if buf is None:
            return False
        req = PrefillRequest(rid, ids)
        req.buf = buf
        req.buf[: len(ids)] = torch.as_tensor(ids)
        await self.inbox.put(req)
        return True

    async def enqueue_budgeted(self, rid: str, ids: list[int]) -> bool:
        if not self.budget.try_reserve(len(ids)):  # leak: not refunded when no buffer is free
            return False
        buf = self.buffers.get_buffer_nowait()  # clean: moves into the inbox with its request
        if buf is None:
            return False
        buf[: len(ids)] = torch.as_tensor(ids)
        await self.inbox.put(PrefillRequest(rid, ids, buf, len(ids)))
        return True

    async def enqueue_or_skip(self, rid: str, ids: list[int]) -> bool:
        if not self.budget.try_reserve(len(ids)):  # clean: near miss, refunded when no buffer is free
            return False
        buf = self.buffers.get_buffer_nowait()  # clean: moves into the inbox with its request
        if buf is None:
            await self.budget.refund(len(ids))
            return False
        buf[: len(ids)] = torch.as_tensor(ids)
        await self.inbox.put(PrefillRequest(rid, ids, buf, len(ids)))
        return True

    async def pump(self) -> None:
        while True:
            req = await self.inbox.get()
            try:
                await self.model(req.buf[: len(req.ids)])
            except RuntimeError:
                logger.exception("prefill of %s failed", req.rid)
            finally:
                await self._teardown(req)

    async def warmup(self, lengths: list[int]) -> int:
        ran = 0
        for n in lengths:
            buf = await self.buffers.get_buffer()  # leak: a length that fails goes on to the next without recycle
            try:
                await self.model(buf[:n])
            except RuntimeError as exc:
                logger.warning("warmup of %d: %s", n, exc)
                continue
            self.buffers.recycle(buf)
            ran += 1
        return ran

    async def stream_logits(self, ids: list[int], step: int) -> AsyncIterator[torch.Tensor]:
        buf = await self.buffers.get_buffer()  # clean: recycled in finally when the stream is closed
        try:
            buf[: len(ids)] = torch.as_tensor(ids)
            for i in range(0, len(ids), step):
                yield await self.model(buf[: i + step])
        finally:
            self.buffers.recycle(buf)

    async def shutdown(self) -> None:
        while not self.inbox.empty():
            await self._teardown(self.inbox.get_nowait())
        if self.tasks:
            await asyncio.gather(*self.tasks, return_exceptions=True)
