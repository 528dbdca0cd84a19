"""Routes tokens to seats and keeps the table for the combine step."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence, Tuple


from .capacity import OverflowPool, Seat


@dataclass(frozen=True)
class Route:
    token_ids: Tuple[int, ...]
    weight: float
    seat: Optional[Seat] = None


class Router:
    def __init__(self, pool: OverflowPool, top_k: int):
        self.pool = pool
        self.top_k = top_k
        self._table: Dict[int, List[Route]] = {}
        self._shadow: Dict[int, Seat] = {}
        self.dropped = 0

    def assign(self, batch: int, expert: int, token_ids: Sequence[int], weight: float) -> bool:
        seat = self.pool.rent(expert, len(token_ids))  # clean: near miss, the table is emptied by finish
        if seat is None:
            self.dropped += len(token_ids)
            return False
        route = Route(tuple(token_ids), weight)
        self._table.setdefault(batch, []).append(replace(route, seat=seat))
        return True

    def routes(self, batch: int) -> List[Route]:
        return self._table.get(batch, [])

    def finish(self, batch: int) -> None:
        for route in self._table.pop(batch, ()):
            if route.seat is not None:
                self.pool.unrent(route.seat)
        self._shadow.pop(batch, None)

    def shadow(self, batch: int, expert: int, rows: int) -> bool:
        """A second seat for the batch, to compare routing decisions."""
        if batch in self._shadow:
            return True
        seat = self.pool.rent(expert, rows)  # leak: finish pops the shadow seat and does not unrent it
        if seat is None:
            return False
        self._shadow[batch] = seat
        return True

    def plan(self, expert: int, groups: Sequence[Sequence[int]]) -> List[Route]:
        """Routes whose seats belong to the caller."""
        planned: List[Route] = []
        for ids in groups:
            if not ids:
                continue
            seat = self.pool.rent(expert, len(ids))  # clean: handed to the caller in the routes
            if seat is None:
                self.dropped += len(ids)
                break
            planned.append(Route(tuple(ids), 1.0, seat))
        return planned

    def fits(self, expert: int, groups: Sequence[Sequence[int]]) -> bool:
        planned = self.plan(expert, groups)  # leak: seats go back only when not everything fitted
        if len(planned) < sum(1 for ids in groups if ids):
            for route in planned:
                self.pool.unrent(route.seat)
            return False
        return True

    def adopt(self, batch: int, expert: int, groups: Sequence[Sequence[int]]) -> int:
        planned = self.plan(expert, groups)  # clean: near miss, the table of finish takes them over
        self._table.setdefault(batch, []).extend(planned)
        return len(planned)

    def adopt_weighted(self, batch: int, expert: int, groups: Sequence[Sequence[int]], weights) -> int:
        planned = self.plan(expert, groups)  # leak: the routes entered are rebuilt without their seats
        entries = [Route(route.token_ids, weight) for route, weight in zip(planned, weights)]
        self._table.setdefault(batch, []).extend(entries)
        return len(entries)
