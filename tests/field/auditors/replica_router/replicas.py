from __future__ import annotations

import asyncio
from typing import Optional


class ReplicaError(Exception): ...


class Replica:
    def __init__(self, name: str, max_ongoing: int) -> None:
        self.name = name
        self.max_ongoing = max_ongoing
        self.ongoing = 0
        self.draining = False

    def enter(self) -> bool:
        if self.ongoing >= self.max_ongoing:
            return False
        self.ongoing += 1
        return True

    def exit(self) -> None:
        self.ongoing -= 1

    async def infer(self, payload: str) -> str:
        await asyncio.sleep(0)
        if self.draining:
            raise ReplicaError(self.name)
        return f"{self.name}:{payload}"


class ReplicaSet:
    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.affinity: dict[str, Replica] = {}

    def assign(self) -> Optional[Replica]:
        for replica in sorted(self.replicas, key=lambda r: r.ongoing):
            if replica.enter():  # leak: a draining replica is passed over after its place was taken
                if replica.draining:
                    continue
                return replica
        return None

    def assign_sticky(self, key: str) -> Optional[Replica]:
        known = self.affinity.get(key)
        if known is not None and known.enter():  # clean: near miss, the entered replica is returned and the caller exits it
            return known
        replica = self.assign()  # clean: returned to the caller, affinity is only a hint
        if replica is not None:
            self.affinity[key] = replica
        return replica

    def assign_two(self) -> Optional[tuple[Replica, Replica]]:
        first = self.assign()  # leak: when there is no second replica the first keeps its place taken
        if first is None:
            return None
        second = self.assign()  # clean: returned in the pair
        if second is None:
            return None
        return first, second
