from __future__ import annotations

from typing import List, Optional

from .pool import ParamBuffer, ParamBufferPool


class PartitionedParam:
    """The local shard, and the gathered buffer while there are active users."""

    def __init__(self, name: str, shard: List[float], world: int, pool: ParamBufferPool, persistent: bool = False) -> None:
        self.name = name
        self.shard = shard
        self.world = world
        self.pool = pool
        self.persistent = persistent
        self.users = 0
        self.full: Optional[ParamBuffer] = None

    def gather(self) -> bool:
        """Adds a user; partition() takes it away again."""
        if self.full is None:
            self.full = self.pool.lend(len(self.shard) * self.world)  # clean: near miss, kept in the field, partition hands it back with the last user
            if self.full is None:
                return False
            self.full.values[:len(self.shard) * self.world] = self.shard * self.world
        self.users += 1
        return True

    def partition(self) -> None:
        self.users -= 1
        if self.users == 0 and self.full is not None:
            self.pool.hand_back(self.full)
            self.full = None

    def update(self, values: List[float]) -> None:
        n = len(self.shard)
        self.shard = values[:n]
        if self.full is not None:
            self.full.values[:n * self.world] = self.shard * self.world


class TiedParam(PartitionedParam):
    """Embedding and head share one shard; `resize` changes the vocabulary."""

    def resize(self, shard: List[float]) -> bool:
        fresh = self.pool.lend(len(shard) * self.world)  # clean: near miss, swapped in and the old one handed back, or handed back itself
        if fresh is None:
            return False
        self.shard = shard
        if self.users == 0:
            self.pool.hand_back(fresh)
            return True
        old, self.full = self.full, fresh
        fresh.values[:len(shard) * self.world] = shard * self.world
        if old is not None:
            self.pool.hand_back(old)
        return True

    def snapshot(self, other: "TiedParam") -> Optional[List[float]]:
        mine = self.pool.lend(len(self.shard))  # leak: differing lengths return without hand_back
        if mine is None or len(self.shard) != len(other.shard):
            return None
        mine.values[:len(self.shard)] = [a - b for a, b in zip(self.shard, other.shard)]
        diff = list(mine.values[:len(self.shard)])
        self.pool.hand_back(mine)
        return diff
