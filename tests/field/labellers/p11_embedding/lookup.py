"""Sharded lookups which work in blocks of the arenas."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch

from .arena import TableArenas


class ShardedLookup:
    def __init__(self, arenas: TableArenas, weights: Dict[str, torch.Tensor]) -> None:
        self.arenas = arenas
        self.weights = weights
        self.awaiting: Dict[int, Dict[str, torch.Tensor]] = {}

    def gather(self, table: str, ids: torch.Tensor) -> Optional[torch.Tensor]:
        block = self.arenas.take(table)  # clean: near miss, put back when there are no ids, otherwise handed to the caller
        if block is None:
            return None
        if ids.numel() == 0:
            self.arenas.put_back(table, block)
            return None
        block[: ids.numel()].copy_(self.weights[table][ids])
        return block

    def pooled(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        rows = self.gather(table, ids)  # leak: only the sum is returned, the block is dropped
        if rows is None:
            return torch.zeros(self.weights[table].shape[1])
        return rows[: ids.numel()].sum(dim=0)

    def mean(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        rows = self.gather(table, ids)  # clean: put back after the mean is taken
        if rows is None:
            return torch.zeros(self.weights[table].shape[1])
        out = rows[: ids.numel()].mean(dim=0)
        self.arenas.put_back(table, rows)
        return out

    def start(self, step: int, batch: Dict[str, torch.Tensor]) -> None:
        parts = self.awaiting.setdefault(step, {})
        for table, ids in batch.items():
            if table in parts:
                continue
            rows = self.gather(table, ids)  # clean: kept under the step, put back by wait or cancel
            if rows is not None:
                parts[table] = rows

    def wait(self, step: int) -> Dict[str, torch.Tensor]:
        out: Dict[str, torch.Tensor] = {}
        for table, rows in self.awaiting.pop(step, {}).items():
            out[table] = rows.sum(dim=0)
            self.arenas.put_back(table, rows)
        return out

    def cancel(self) -> None:
        for step in list(self.awaiting):
            self.wait(step)

    def first_hit(self, tables: List[str], ids: torch.Tensor) -> Optional[torch.Tensor]:
        for table in tables:
            rows = self.gather(table, ids)  # leak: blocks of the all-zero tables are left behind when the loop goes on
            if rows is None:
                continue
            if bool(rows[: ids.numel()].any()):
                out = rows[: ids.numel()].clone()
                self.arenas.put_back(table, rows)
                return out
        return None
