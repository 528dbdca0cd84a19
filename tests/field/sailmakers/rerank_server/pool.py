"""Token buffers padded to buckets, and score tensors."""
import threading
from typing import Dict, List, Optional

import torch

BUCKETS = (64, 128, 256, 512)


class RowLease:
    def __init__(self, pool: "PaddedPool", t: torch.Tensor):
        self.pool, self.t = pool, t

    def __enter__(self) -> torch.Tensor:
        return self.t

    def __exit__(self, *exc) -> None:
        self.end()

    def end(self) -> None:
        if self.t is not None:
            self.pool._shelve(self.t)
            self.t = None


class PaddedPool:
    def __init__(self, per_bucket: int):
        self._mu = threading.Lock()
        self._shelves: Dict[int, List[torch.Tensor]] = {
            b: [torch.zeros(b, dtype=torch.int64) for _ in range(per_bucket)] for b in BUCKETS
        }

    def _shelve(self, t: torch.Tensor) -> None:
        with self._mu:
            self._shelves[t.numel()].append(t.zero_())

    def lease(self, n: int) -> Optional[RowLease]:
        for b in BUCKETS:
            if b < n:
                continue
            with self._mu:
                if self._shelves[b]:
                    return RowLease(self, self._shelves[b].pop())  # clean: returned inside the RowLease
        return None

    def lease_filled(self, tokens: List[int], limit: int) -> Optional[RowLease]:
        row = self.lease(len(tokens))  # leak: tokens above the vocabulary limit return None without end()
        if row is None:
            return None
        if tokens and max(tokens) >= limit:
            return None
        row.t[:len(tokens)] = torch.tensor(tokens)
        return row


class ScorePool:
    """Score tensors by length, used by runner and postproc."""

    def __init__(self):
        self._by_len: Dict[int, List[torch.Tensor]] = {}

    def draw(self, n: int) -> torch.Tensor:
        spare = self._by_len.get(n)
        return spare.pop() if spare else torch.empty(n)  # clean: returned to the caller

    def back(self, t: torch.Tensor) -> None:
        self._by_len.setdefault(t.numel(), []).append(t)
