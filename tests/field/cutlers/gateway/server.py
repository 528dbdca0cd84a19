from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import AsyncIterator, Optional

from .channels import Channel, ChannelPool, WorkerBusy
from .limits import TenantLimiter

logger = logging.getLogger(__name__)


@dataclass
class Call:
    tenant: str
    payload: bytes
    tokens: int
    sticky: Optional[str] = None


class Gateway:
    def __init__(self, pool: ChannelPool, limiter: TenantLimiter, retries: int = 3) -> None:
        self.pool = pool
        self.limiter = limiter
        self.retries = retries
        self.sticky: dict[str, Channel] = {}

    async def handle(self, call: Call) -> Optional[bytes]:
        if not await self.limiter.enter(call.tenant, call.tokens):  # clean: leave in finally
            return None
        try:
            async with self.pool.channel() as ch:  # clean: context manager
                return await ch.call(call.payload)
        finally:
            self.limiter.leave(call.tenant, call.tokens)

    async def handle_fast(self, call: Call) -> Optional[bytes]:
        if not await self.limiter.enter_fast(call.tenant, call.tokens):  # leak: an empty payload returns before leave
            return None
        if not call.payload:
            return b""
        try:
            return await self._retrying(call.payload)
        finally:
            self.limiter.leave(call.tenant, call.tokens)

    async def _retrying(self, payload: bytes) -> Optional[bytes]:
        for attempt in range(self.retries):
            ch = await self.pool.lease()  # clean: near miss, every turn hands it back in finally
            try:
                return await ch.call(payload)
            except WorkerBusy:
                logger.info("attempt %d: %s busy", attempt, ch.worker)
            finally:
                await self.pool.hand_back(ch)
        return None

    async def hedge(self, payload: bytes) -> Optional[bytes]:
        ch = await self.pool.lease_healthy()  # leak: the busy channel of a failed try is overwritten in the loop
        for _ in range(self.retries):
            if ch is None:
                return None
            try:
                out = await ch.call(payload)
            except WorkerBusy:
                ch = await self.pool.lease_healthy()  # leak: overwritten by the next try, or dropped when the tries are used up
                continue
            await self.pool.hand_back(ch)
            return out
        return None

    async def stream(self, call: Call) -> AsyncIterator[bytes]:
        ch = await self.pool.lease()  # clean: near miss, the generator's finally hands it back also when it is closed early
        try:
            async for part in ch.chunks(call.payload):
                if not part.strip():
                    continue
                yield part
        finally:
            await self.pool.hand_back(ch)

    async def bind(self, session: str) -> Channel:
        ch = self.sticky.get(session)
        if ch is not None and ch.healthy:
            return ch
        fresh = await self.pool.lease()  # leak: an unhealthy predecessor of the session is overwritten without hand_back
        self.sticky[session] = fresh
        return fresh

    async def unbind(self, session: str) -> None:
        ch = self.sticky.pop(session, None)
        if ch is not None:
            await self.pool.hand_back(ch)

    async def fan_out(self, payloads: list[bytes]) -> list[bytes]:
        async def one(ch: Channel, p: bytes) -> bytes:
            try:
                return await ch.call(p)
            finally:
                await self.pool.hand_back(ch)

        tasks = []
        for p in payloads:
            ch = await self.pool.lease()  # clean: near miss, the task hands it back
            tasks.append(asyncio.create_task(one(ch, p)))
        return await asyncio.gather(*tasks)
