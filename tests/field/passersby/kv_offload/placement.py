"""Where the chunks of a sequence live."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .tiers import Tier


@dataclass
class Placement:
    tier: Tier
    chunks: List[int] = field(default_factory=list)

    def drop(self) -> None:
        self.tier.free(self.chunks)
        self.chunks = []


def place(tiers: List[Tier], n: int) -> Optional[Placement]:
    """First tier with room."""
    for tier in tiers:
        chunks = tier.allocate(n)  # clean: near miss, None moves on with nothing held, otherwise in the placement
        if chunks is not None:
            return Placement(tier, chunks)
    return None


class PlacementTable:
    def __init__(self) -> None:
        self._rows: Dict[str, Placement] = {}

    def put(self, key: str, p: Placement) -> None:
        old = self._rows.pop(key, None)
        if old is not None:
            old.drop()
        self._rows[key] = p

    def take(self, key: str) -> Optional[Placement]:
        """Removes the row; the caller is responsible for the placement."""
        return self._rows.pop(key, None)

    def peek(self, key: str) -> Optional[Placement]:
        return self._rows.get(key)

    def clear(self) -> None:
        for p in self._rows.values():
            p.drop()
        self._rows.clear()
