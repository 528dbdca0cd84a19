"""Gradient scatter and the prefetching pipeline."""
from __future__ import annotations

from collections import deque
from typing import Deque, Optional, Tuple

import torch

from .lookup import ShardedLookup


class Pipeline:
    def __init__(self, lookup: ShardedLookup) -> None:
        self.lookup = lookup
        self.ahead: Deque[Tuple[str, torch.Tensor]] = deque()
        self.grad: Optional[torch.Tensor] = None
        self.history: Deque[Tuple[str, torch.Tensor]] = deque(maxlen=2)

    def prefetch(self, table: str, ids: torch.Tensor) -> bool:
        rows = self.lookup.gather(table, ids)  # clean: queued, consume puts it back
        if rows is None:
            return False
        self.ahead.append((table, rows))
        return True

    def consume(self) -> Optional[torch.Tensor]:
        if not self.ahead:
            return None
        table, rows = self.ahead.popleft()
        out = rows.clone()
        self.lookup.arenas.put_back(table, rows)
        return out

    def remember(self, table: str, ids: torch.Tensor) -> None:
        rows = self.lookup.gather(table, ids)  # leak: the bounded deque silently pushes out blocks and nothing empties it
        if rows is not None:
            self.history.append((table, rows))

    def open_grad(self, table: str) -> bool:
        if self.grad is None:
            self.grad = self.lookup.arenas.take(table)  # clean: near miss, taken only when the field is empty, close_grad puts it back
        return self.grad is not None

    def close_grad(self, table: str) -> None:
        grad, self.grad = self.grad, None
        if grad is not None:
            self.lookup.arenas.put_back(table, grad)
