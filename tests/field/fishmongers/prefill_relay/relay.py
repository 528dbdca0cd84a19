"""Source side: prefill, send, and wait for the acknowledgement."""
from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .blocks import BlockPool, PoolEmpty
from .links import Link, LinkDown

log = logging.getLogger(__name__)

BLOCK = 64


@dataclass
class Request:
    id: str
    tokens: list[int]
    cancelled: bool = False


@dataclass(eq=False)
class Transfer:
    request: Request
    link: Link
    remote: BlockPool
    src: list[int]
    dst: list[int] = field(default_factory=list)


Compute = Callable[[list[int], list[int]], Awaitable[int]]


class Relay:
    def __init__(self, pool: BlockPool, compute: Compute) -> None:
        self._pool = pool
        self._compute = compute
        self._flying: dict[str, Transfer] = {}
        self.acked = self.nacked = 0

    async def prefill(self, request: Request) -> list[int] | None:
        need = math.ceil(len(request.tokens) / BLOCK)
        blocks = await self._pool.grab_wait(need, patience=2.0)  # leak: a request cancelled during the computation returns None
        first = await self._compute(request.tokens, blocks)
        if request.cancelled:
            log.info("%s was cancelled", request.id)
            return None
        request.tokens.append(first)
        return blocks

    async def send(self, request: Request, link: Link, remote: BlockPool) -> bool:
        src = await self.prefill(request)  # clean: near miss, given back by the handlers, on_ack() or on_nack()
        if src is None:
            return False
        try:
            await link.take(len(src))  # leak: an empty remote pool gives the source blocks back, not the credits
            dst = remote.grab(len(src))  # leak: on_nack() forgets the destination blocks
        except (LinkDown, PoolEmpty) as exc:
            log.warning("%s: %r", request.id, exc)
            self._pool.give(src)
            return False
        self._flying[request.id] = Transfer(request, link, remote, src, dst)
        try:
            await link.write(request.id, src, dst)
        except LinkDown:
            self.on_nack(request.id)
            return False
        return True

    def on_ack(self, request_id: str, decode: Callable[[Request, list[int]], None]) -> None:
        transfer = self._flying.pop(request_id)
        self.acked += 1
        self._pool.give(transfer.src)
        transfer.link.refund(len(transfer.src))
        decode(transfer.request, transfer.dst)

    def on_nack(self, request_id: str) -> None:
        transfer = self._flying.pop(request_id)
        self.nacked += 1
        self._pool.give(transfer.src)
        transfer.link.refund(len(transfer.src))

    async def push_prefix(self, tokens: list[int], links: list[Link], workers: list) -> int:
        """Best effort copy of a popular prefix to every decode host."""
        sent = 0
        need = math.ceil(len(tokens) / BLOCK)
        async with self._pool.scratch(need) as src:  # clean: context manager
            await self._compute(tokens, src)
            for link, worker in zip(links, workers):
                if not link.try_take(need):  # clean: near miss, False took nothing, every other way out refunds in the finally
                    continue
                try:
                    dst = worker.pool.grab(need)  # clean: near miss, given back when the link is down, otherwise adopted by the worker
                    try:
                        await link.write("prefix", src, dst)
                    except LinkDown:
                        worker.pool.give(dst)
                        continue
                    worker.adopt_prefix(tokens, dst)
                    sent += 1
                except PoolEmpty:
                    continue
                finally:
                    link.refund(need)
        return sent

    async def drain(self, timeout: float) -> int:
        deadline = asyncio.get_running_loop().time() + timeout
        while self._flying and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        for request_id in list(self._flying):
            self.on_nack(request_id)
        return self.nacked
