from __future__ import annotations

from typing import Dict, Sequence, Tuple

from .coordinator import LeaseBoard, ShardLease
from .worker import ShardStore


class Rebalancer:
    """Moves rows between shards; both ends are leased for the move."""

    def __init__(self, board: LeaseBoard, store: ShardStore) -> None:
        self.board = board
        self.store = store
        self._plan: Dict[Tuple[int, int], Tuple[ShardLease, ShardLease]] = {}

    def merge(self, src: int, dst: int) -> bool:
        source = self.board.lease(src, "rebalancer")  # leak: not surrendered when the target is taken
        if source is None:
            return False
        target = self.board.lease(dst, "rebalancer")  # clean: surrendered at the end
        if target is None:
            return False
        self.store.rows.setdefault(dst, []).extend(self.store.rows.pop(src, []))
        self.board.surrender(target)
        self.board.surrender(source)
        return True

    def plan_move(self, src: int, dst: int) -> bool:
        if (src, dst) in self._plan:
            return False
        source = self.board.lease(src, "rebalancer")  # clean: near miss, rolled back or kept in the plan
        if source is None:
            return False
        target = self.board.lease(dst, "rebalancer")  # clean: kept in the plan, run_plan takes it out
        if target is None:
            self.board.surrender(source)
            return False
        self._plan[(src, dst)] = (source, target)
        return True

    def run_plan(self) -> int:
        moved = 0
        while self._plan:
            (src, dst), (source, target) = self._plan.popitem()
            rows = self.store.rows.pop(src, [])
            self.store.rows.setdefault(dst, []).extend(rows)
            moved += len(rows)
            self.board.surrender(source)
            self.board.surrender(target)
        return moved

    def even_out(self, shards: Sequence[int]) -> int:
        """Deal the rows of all shards round-robin."""
        leases = self.board.lease_all(shards, "rebalancer")  # leak: return 0 when the shards are empty
        if not leases:
            return 0
        rows = [r for lease in leases for r in self.store.rows.get(lease.shard, ())]
        if not rows:
            return 0
        for i, lease in enumerate(leases):
            self.store.rows[lease.shard] = rows[i::len(leases)]
        for lease in leases:
            self.board.surrender(lease)
        return len(rows)
