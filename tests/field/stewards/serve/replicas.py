from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Optional


@dataclass(eq=False)
class Replica:
    name: str
    max_ongoing: int
    ongoing: int = 0
    draining: bool = False


class ReplicaSet:
    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = {r.name: r for r in replicas}

    def inc_ongoing(self, replica: Replica) -> bool:
        if replica.draining or replica.ongoing >= replica.max_ongoing:
            return False
        replica.ongoing += 1
        return True

    def dec_ongoing(self, replica: Replica) -> None:
        replica.ongoing -= 1

    def get(self, name: str) -> Optional[Replica]:
        return self._replicas.get(name)

    def choose(self) -> Optional[Replica]:
        names = random.sample(list(self._replicas), k=min(2, len(self._replicas)))
        for replica in sorted((self._replicas[n] for n in names), key=lambda r: r.ongoing):
            if self.inc_ongoing(replica):  # clean: near miss, the first that accepts is returned with its count
                return replica
        return None

    def choose_preferring(self, preferred: set[str]) -> Optional[Replica]:
        fallback: Optional[Replica] = None
        for replica in self._replicas.values():
            if not self.inc_ongoing(replica):  # leak: a fallback found before the preferred one is forgotten with its count
                continue
            if replica.name in preferred:
                return replica
            if fallback is None:
                fallback = replica
            else:
                self.dec_ongoing(replica)
        return fallback
