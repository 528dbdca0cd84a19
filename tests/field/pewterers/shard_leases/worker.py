from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Sequence

from .coordinator import LeaseBoard, ShardLease

MIN_COMPACT_ROWS = 4


class ShardStore:
    def __init__(self) -> None:
        self.rows: Dict[int, List[int]] = {}
        self.sealed: set = set()


class ShardWorker:
    def __init__(self, name: str, board: LeaseBoard, store: ShardStore) -> None:
        self.name = name
        self.board = board
        self.store = store
        self._owned: Dict[int, ShardLease] = {}

    def adopt(self, shard: int) -> bool:
        if shard in self._owned:
            return True
        lease = self.board.lease(shard, self.name)  # clean: kept in _owned, drop() surrenders
        if lease is None:
            return False
        self._owned[shard] = lease
        return True

    def drop(self, shard: int) -> None:
        lease = self._owned.pop(shard, None)
        if lease is not None:
            self.board.surrender(lease)

    def stop(self) -> None:
        for shard in list(self._owned):
            self.drop(shard)

    def query(self, shard: int, row: int) -> Optional[int]:
        with self.board.held(shard, self.name) as lease:  # clean: context manager
            if lease is None:
                return None
            rows = self.store.rows.get(shard, [])
            return rows[row] if row < len(rows) else None

    def compact(self, shard: int) -> int:
        lease = self.board.lease(shard, self.name)  # leak: a small shard returns early
        if lease is None:
            return 0
        rows = self.store.rows.get(shard, [])
        if len(rows) < MIN_COMPACT_ROWS:
            return 0
        kept = sorted(set(rows))
        self.store.rows[shard] = kept
        self.board.surrender(lease)
        return len(rows) - len(kept)

    def scrub(self, shards: Iterable[int]) -> List[int]:
        bad: List[int] = []
        for shard in shards:
            lease = self.board.lease(shard, self.name)  # leak: continue for sealed shards
            if lease is None:
                continue
            if shard in self.store.sealed:
                continue
            if any(r < 0 for r in self.store.rows.get(shard, ())):
                bad.append(shard)
            self.board.surrender(lease)
        return bad

    def seal_all(self, shards: Sequence[int]) -> int:
        leases = self.board.lease_all(shards, self.name)  # clean: every one surrendered in finally
        if leases is None:
            return 0
        try:
            for lease in leases:
                self.store.sealed.add(lease.shard)
            return len(leases)
        finally:
            for lease in leases:
                self.board.surrender(lease)
