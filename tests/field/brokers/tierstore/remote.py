from __future__ import annotations

import asyncio
from typing import Protocol

from .arena import Arena, MemoryObj


class Wire(Protocol):
    async def get(self, key: str) -> bytes | None: ...

    async def put(self, key: str, raw: bytes) -> None: ...


class Credits:
    def __init__(self, n: int) -> None:
        self._left = n
        self._waiters = asyncio.Condition()

    async def spend(self) -> None:
        async with self._waiters:
            await self._waiters.wait_for(lambda: self._left > 0)
            self._left -= 1

    async def refund(self) -> None:
        async with self._waiters:
            self._left += 1
            self._waiters.notify()


class RemoteTier:
    def __init__(self, wire: Wire, arena: Arena, credits: Credits) -> None:
        self.wire = wire
        self.arena = arena
        self.credits = credits
        self.failures = 0

    async def fetch(self, key: str) -> MemoryObj | None:
        await self.credits.spend()  # clean: near miss, the finally refunds for a miss as well
        try:
            raw = await self.wire.get(key)
        finally:
            await self.credits.refund()
        obj = self.arena.allocate()  # leak: a remote miss is noticed only after the page was allocated
        if obj is None:
            return None
        if raw is None:
            return None
        obj.data[: len(raw)].copy_(torch_bytes(raw))
        return obj

    async def push(self, key: str, obj: MemoryObj) -> bool:
        await self.credits.spend()  # leak: the handled connection error returns False before the refund
        try:
            await self.wire.put(key, bytes(obj.data.numpy()))
        except ConnectionError:
            self.failures += 1
            return False
        await self.credits.refund()
        return True

    async def push_all(self, items: dict[str, MemoryObj]) -> int:
        ok = 0
        for key, obj in items.items():
            await self.credits.spend()  # clean: near miss, both the error branch and the normal one refund
            try:
                await self.wire.put(key, bytes(obj.data.numpy()))
            except ConnectionError:
                await self.credits.refund()
                self.failures += 1
                continue
            await self.credits.refund()
            ok += 1
        return ok


def torch_bytes(raw: bytes):
    import torch

    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
