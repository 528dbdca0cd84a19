"""Leased RPC channels between the front end and the model workers."""
from __future__ import annotations

import asyncio
from typing import Any, Dict, List, Optional, Sequence


class LeaseTimeout(Exception):
    pass


class Channel:
    def __init__(self, target: str) -> None:
        self.target = target
        self.healthy = True

    async def hello(self, version: int) -> bool:
        await asyncio.sleep(0)
        return self.healthy and version >= 2

    async def unary(self, method: str, body: Any) -> Any:
        await asyncio.sleep(0)
        if not self.healthy:
            raise ConnectionError(self.target)
        return body


class ChannelManager:
    def __init__(self, per_target: int = 2) -> None:
        self.per_target = per_target
        self._idle: Dict[str, List[Channel]] = {}
        self._count: Dict[str, int] = {}
        self.leased = 0

    async def lease(self, target: str, timeout: float = 1.0) -> Channel:
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            idle = self._idle.setdefault(target, [])
            if idle:
                self.leased += 1
                return idle.pop()
            if self._count.get(target, 0) < self.per_target:
                self._count[target] = self._count.get(target, 0) + 1
                self.leased += 1
                return Channel(target)
            if asyncio.get_running_loop().time() > deadline:
                raise LeaseTimeout(target)
            await asyncio.sleep(0.005)

    def give_back(self, channel: Channel) -> None:
        self.leased -= 1
        self._idle[channel.target].append(channel)

    async def lease_any(self, targets: Sequence[str]) -> Optional[Channel]:
        for target in targets:
            channel = await self.lease(target)  # leak: an unhealthy channel is passed over and not given back
            if channel.healthy:
                return channel
        return None

    async def lease_healthy(self, targets: Sequence[str]) -> Optional[Channel]:
        for target in targets:
            channel = await self.lease(target)  # clean: returned when healthy, else given back
            if channel.healthy:
                return channel
            self.give_back(channel)
        return None
