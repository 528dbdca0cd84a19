"""Sharded embedding tables: one row allocator per shard, pooled staging tensors on the host."""
from __future__ import annotations

import heapq
import logging
import threading
from typing import Iterable, Optional, Sequence

import torch

log = logging.getLogger("emb.shards")


class RowAllocator:
    """Lowest row first. ``alloc_row`` answers None when the shard is full."""

    def __init__(self, rows: int):
        self.rows = rows
        self._next = 0
        self._returned: list[int] = []
        self._mu = threading.Lock()

    def alloc_row(self) -> Optional[int]:
        with self._mu:
            if self._returned:
                return heapq.heappop(self._returned)
            if self._next < self.rows:
                row = self._next
                self._next += 1
                return row
            return None

    def retire_row(self, row: int) -> None:
        with self._mu:
            heapq.heappush(self._returned, row)


class StagingTensors:
    """Host tensors cached by (rows, dim); grows on demand, never shrinks."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.outstanding = 0

    def checkout(self, rows: int, dim: int) -> torch.Tensor:
        self.outstanding += 1
        stack = self._idle.get((rows, dim))
        if stack:
            return stack.pop()
        return torch.empty(rows, dim)

    def checkin(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._idle.setdefault((t.shape[0], t.shape[1]), []).append(t)


class Shard:
    def __init__(self, index: int, rows: int, dim: int, staging: StagingTensors):
        self.index = index
        self.dim = dim
        self.alloc = RowAllocator(rows)
        self.staging = staging
        self.weight = torch.zeros(rows, dim)
        self.row_of: dict[int, int] = {}
        self.frozen: set[int] = set()

    def insert(self, key: int, vec: torch.Tensor) -> bool:
        row = self.alloc.alloc_row()  # leak: the new row is dropped when the key is already present
        if row is None:
            return False
        if key in self.row_of:
            return False
        self.weight[row] = vec
        self.row_of[key] = row
        return True

    def upsert(self, key: int, vec: torch.Tensor) -> bool:
        row = self.row_of.get(key)
        if row is None:
            row = self.alloc.alloc_row()  # clean: near miss, kept in row_of only where the key had none, evict() retires it
            if row is None:
                return False
            self.row_of[key] = row
        self.weight[row] = vec
        return True

    def replace(self, key: int, vec: torch.Tensor) -> bool:
        fresh = self.alloc.alloc_row()  # clean: near miss, the row it displaces is retired
        if fresh is None:
            return False
        self.weight[fresh] = vec
        stale = self.row_of.get(key)
        self.row_of[key] = fresh
        if stale is not None:
            self.alloc.retire_row(stale)
        return True

    def bulk_load(self, keys: Sequence[int], vecs: torch.Tensor) -> bool:
        rows: list[int] = []
        for _ in keys:
            row = self.alloc.alloc_row()  # leak: rows taken so far are dropped when the shard fills up half way
            if row is None:
                log.warning("shard %d full after %d rows", self.index, len(rows))
                return False
            rows.append(row)
        for key, row, vec in zip(keys, rows, vecs):
            old = self.row_of.pop(key, None)
            if old is not None:
                self.alloc.retire_row(old)
            self.weight[row] = vec
            self.row_of[key] = row
        return True

    def reserve(self, n: int) -> Optional[list[int]]:
        rows: list[int] = []
        while len(rows) < n:
            row = self.alloc.alloc_row()  # clean: all retired on shortage, else the list goes to the caller
            if row is None:
                for r in rows:
                    self.alloc.retire_row(r)
                return None
            rows.append(row)
        return rows

    def evict(self, keys: Iterable[int]) -> int:
        n = 0
        for key in keys:
            row = self.row_of.pop(key, None)
            if row is None:
                continue
            self.weight[row].zero_()
            self.alloc.retire_row(row)
            n += 1
        return n

    def gather_rows(self, keys: Sequence[int]) -> torch.Tensor:
        out = self.staging.checkout(len(keys), self.dim)  # clean: returned to the caller, who checks it in
        out.zero_()
        for i, key in enumerate(keys):
            row = self.row_of.get(key)
            if row is not None:
                out[i] = self.weight[row]
        return out


class ShardedTable:
    def __init__(self, shards: int, rows: int, dim: int):
        self.staging = StagingTensors()
        self.shards = [Shard(i, rows, dim, self.staging) for i in range(shards)]
        self.dim = dim

    def owner(self, key: int) -> Shard:
        return self.shards[key % len(self.shards)]

    def lookup_one(self, key: int) -> torch.Tensor:
        return self.owner(key).gather_rows([key])[0].clone()  # leak: the staging tensor is copied out of and dropped

    def lookup(self, keys: Sequence[int], out: torch.Tensor) -> None:
        by_shard: dict[int, list[int]] = {}
        for pos, key in enumerate(keys):
            by_shard.setdefault(self.owner(key).index, []).append(pos)
        for idx, positions in by_shard.items():
            host = self.shards[idx].gather_rows([keys[p] for p in positions])  # clean: checked in after the copy
            out[positions] = host
            self.staging.checkin(host)

    def pooled_mean(self, keys: Sequence[int], scratch: Optional[torch.Tensor] = None) -> torch.Tensor:
        borrowed = scratch is not None
        if not borrowed:
            scratch = self.staging.checkout(len(keys), self.dim)  # clean: near miss, given back under the same flag
        for i, key in enumerate(keys):
            shard = self.owner(key)
            row = shard.row_of.get(key)
            if row is None:
                scratch[i].zero_()
            else:
                scratch[i].copy_(shard.weight[row])
        mean = scratch.mean(dim=0)
        if not borrowed:
            self.staging.checkin(scratch)
        return mean

    def push_gradients(self, keys: Sequence[int], grads: torch.Tensor, lr: float) -> int:
        step = self.staging.checkout(len(keys), self.dim)  # leak: not checked in when the gradients are not finite
        torch.mul(grads, -lr, out=step)
        if not torch.isfinite(step).all():
            log.error("dropping non-finite update for %d keys", len(keys))
            return 0
        applied = 0
        for i, key in enumerate(keys):
            shard = self.owner(key)
            row = shard.row_of.get(key)
            if row is None or key in shard.frozen:
                continue
            shard.weight[row] += step[i]
            applied += 1
        self.staging.checkin(step)
        return applied

    def rebalance(self, src: Shard, dst: Shard, keys: Iterable[int]) -> int:
        moved = 0
        for key in list(keys):
            if key not in src.row_of or key in dst.row_of:
                continue
            row = dst.alloc.alloc_row()  # leak: a frozen key goes to the next one with the new row in hand
            if row is None:
                break
            if key in src.frozen:
                continue
            old = src.row_of.pop(key)
            dst.weight[row] = src.weight[old]
            dst.row_of[key] = row
            src.alloc.retire_row(old)
            moved += 1
        return moved

    def snapshot(self, idx: int, path: str) -> None:
        shard = self.shards[idx]
        keys = sorted(shard.row_of)
        host = shard.gather_rows(keys)  # clean: checked in by finally
        try:
            torch.save({"keys": keys, "rows": host}, path)
        finally:
            self.staging.checkin(host)

    def preload(self, idx: int, keys: Sequence[int], vecs: torch.Tensor) -> bool:
        shard = self.shards[idx]
        fresh = [k for k in dict.fromkeys(keys) if k not in shard.row_of]
        rows = shard.reserve(len(fresh))  # clean: each row is entered into row_of
        if rows is None:
            return False
        for key, row in zip(fresh, rows):
            shard.weight[row] = vecs[keys.index(key)]
            shard.row_of[key] = row
        return True
