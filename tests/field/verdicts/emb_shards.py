# Row-wise sharded embedding tables with a small hot-row cache.
import logging
from typing import Dict, List, NamedTuple, Optional

import torch
from torch import nn

LOG = logging.getLogger(__name__)


class ShardSpec(NamedTuple):
    table: str
    rows: int
    dim: int


class RowArena:
    """Bitmap arena of cache rows; `take_row` gives an index, `return_row` takes it back."""

    def __init__(self, capacity: int, dim: int):
        self.weight = torch.zeros(capacity, dim)
        self.busy = torch.zeros(capacity, dtype=torch.bool)

    def take_row(self) -> int:
        idle = (~self.busy).nonzero()
        if idle.numel() == 0:
            raise RuntimeError("row arena exhausted")
        row = int(idle[0])
        self.busy[row] = True
        return row

    def return_row(self, row: int) -> None:
        self.busy[row] = False


class ScratchPool:
    def __init__(self, batch: int, dim: int, depth: int = 4):
        self._bufs = [torch.empty(batch, dim) for _ in range(depth)]

    def borrow(self) -> torch.Tensor:
        return self._bufs.pop()

    def give_back(self, t: torch.Tensor) -> None:
        self._bufs.append(t)


class CachedShard(nn.Module):
    def __init__(self, spec: ShardSpec, arena: RowArena, scratch: ScratchPool):
        super().__init__()
        self.spec = spec
        self.arena = arena
        self.scratch = scratch
        self.table = nn.Parameter(torch.randn(spec.rows, spec.dim) * 0.02)
        self.slot_of: Dict[int, int] = {}

    def prefetch(self, ids: List[int]) -> int:
        fetched = 0
        for i in ids:
            if i in self.slot_of:
                continue
            row = self.arena.take_row()  # clean: stored under its id, evict and evict_all return it
            self.arena.weight[row] = self.table.data[i]
            self.slot_of[i] = row
            fetched += 1
        return fetched

    def evict(self, i: int) -> None:
        row = self.slot_of.pop(i, None)
        if row is None:
            return
        self.table.data[i] = self.arena.weight[row]
        self.arena.return_row(row)

    def evict_all(self) -> None:
        for i in list(self.slot_of):
            self.evict(i)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.scratch.borrow()  # leak: rebinding to the normalised tensor loses the borrowed buffer
        torch.index_select(self.table, 0, ids, out=out)
        out = out / out.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        result = out.clone()
        self.scratch.give_back(out)
        return result

    def pooled(self, ids: torch.Tensor, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        out = self.scratch.borrow()  # clean: near miss, in-place scaling keeps the same storage
        torch.index_select(self.table, 0, ids, out=out)
        if weights is not None:
            out *= weights.unsqueeze(-1)
        out.div_(max(1, ids.numel()))
        summed = out.sum(0)
        self.scratch.give_back(out)
        return summed

    def _gather(self, ids: torch.Tensor) -> torch.Tensor:
        buf = self.scratch.borrow()  # clean: returned to the caller
        torch.index_select(self.table, 0, ids, out=buf)
        return buf

    def lookup_cpu(self, ids: torch.Tensor) -> torch.Tensor:
        return self._gather(ids).cpu().clone()  # leak: the gathered buffer is copied and dropped

    def lookup_mean(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._gather(ids)  # clean: given back after the mean
        mean = rows.mean(0)
        self.scratch.give_back(rows)
        return mean

    def grad_norm(self, ids: torch.Tensor) -> float:
        rows = self._gather(ids)  # leak: empty batch returns before give_back
        if ids.numel() == 0:
            return 0.0
        n = float(rows.norm())
        self.scratch.give_back(rows)
        return n


class ShardRebalancer:
    def __init__(self, arena: RowArena):
        self.arena = arena
        self.moves: List[tuple] = []

    def plan(self, hot: List[int], limit: int) -> None:
        for h in hot:
            row = self.arena.take_row()  # leak: the row taken past the limit is never put in the plan
            if len(self.moves) >= limit:
                break
            self.moves.append((h, row))

    def apply(self, shard: CachedShard) -> None:
        while self.moves:
            h, row = self.moves.pop()
            self.arena.weight[row] = shard.table.data[h]
            old = shard.slot_of.pop(h, None)
            shard.slot_of[h] = row
            if old is not None:
                self.arena.return_row(old)

    def swap(self, shard: CachedShard, a: int, b: int) -> None:
        tmp = self.arena.take_row()  # clean: temporary row goes back after the swap
        w = self.arena.weight
        w[tmp] = w[shard.slot_of[a]]
        w[shard.slot_of[a]] = w[shard.slot_of[b]]
        w[shard.slot_of[b]] = w[tmp]
        self.arena.return_row(tmp)
