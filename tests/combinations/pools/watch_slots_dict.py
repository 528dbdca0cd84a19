# take: P.attach(n)
# give: P.detach(X, n)
# gets: optional
# type: ReplicaLoad
from typing import Dict, Optional


class ReplicaLoad:
    """Least-loaded data-parallel replica that still has room for n tokens; detach() with the same n."""

    def __init__(self, capacities: Dict[str, int]):
        self._room = dict(capacities)
        self._full = dict(capacities)

    def attach(self, ntokens: int) -> Optional[str]:
        best = max(self._room, key=self._room.get, default=None)
        if best is None or self._room[best] < ntokens:
            return None
        self._room[best] -= ntokens
        return best

    def detach(self, replica: str, ntokens: int) -> None:
        room = self._room[replica] + ntokens
        if room > self._full[replica]:
            raise ValueError(f"{replica}: more tokens detached than attached")
        self._room[replica] = room

    def utilisation(self) -> Dict[str, float]:
        return {r: 1 - self._room[r] / self._full[r] for r in self._full}
