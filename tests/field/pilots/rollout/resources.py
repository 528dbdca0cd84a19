from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional


@dataclass
class Replica:
    rank: int
    busy: int = 0


class ReplicaLeases:
    def __init__(self, n: int, per_replica: int):
        self.replicas = [Replica(i) for i in range(n)]
        self.per_replica = per_replica

    def engage(self) -> Optional[Replica]:
        best = min(self.replicas, key=lambda r: r.busy)
        if best.busy >= self.per_replica:
            return None
        best.busy += 1
        return best

    def disengage(self, replica: Replica) -> None:
        replica.busy -= 1


class WeightVersions:
    def __init__(self) -> None:
        self._weights: dict[int, Any] = {}
        self._refs: dict[int, int] = {}
        self.current = -1

    def publish(self, weights: Any) -> int:
        self.current += 1
        self._weights[self.current] = weights
        self._refs[self.current] = 0
        self._prune()
        return self.current

    def hold(self) -> int:
        self._refs[self.current] += 1
        return self.current

    def let_go(self, version: int) -> None:
        self._refs[version] -= 1
        self._prune()

    def _prune(self) -> None:
        for v in [v for v, n in self._refs.items() if n == 0 and v != self.current]:
            del self._refs[v], self._weights[v]
