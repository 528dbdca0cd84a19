from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(eq=False)
class ReplicaHandle:
    name: str
    max_ongoing: int
    ongoing: int = 0
    draining: bool = False

    async def call(self, payload: list[str]) -> list[str]:
        await asyncio.sleep(0)
        if self.draining:
            raise ConnectionResetError(self.name)
        return [p.strip() for p in payload]


class ReplicaSet:
    def __init__(self, replicas: list[ReplicaHandle]) -> None:
        self.replicas = replicas

    def pick(self, avoid: ReplicaHandle | None = None) -> ReplicaHandle | None:
        candidates = [r for r in self.replicas if r is not avoid and r.ongoing < r.max_ongoing]
        if not candidates:
            return None
        best = min(candidates, key=lambda r: r.ongoing)
        best.ongoing += 1
        return best

    def settle(self, replica: ReplicaHandle) -> None:
        replica.ongoing -= 1

    def pick_alive(self) -> ReplicaHandle | None:
        first = self.pick()  # leak: a draining first choice is exchanged for another without settling it
        if first is not None and first.draining:
            return self.pick(avoid=first)  # clean: near miss, the second choice goes to the caller
        return first
