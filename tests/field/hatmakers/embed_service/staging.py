"""Reusable host tensors for the encoder, bucketed by row count."""
from __future__ import annotations

import threading
from typing import Sequence

import torch

BUCKETS = (8, 32, 128, 512)


def bucket_for(rows: int) -> int:
    for size in BUCKETS:
        if rows <= size:
            return size
    raise ValueError(f"batch of {rows} rows is too large")


class StagingPool:
    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        self.width = width
        self.dtype = dtype
        self._lock = threading.Lock()
        self._shelves: dict[int, list[torch.Tensor]] = {size: [] for size in BUCKETS}
        self.lent = 0

    def obtain(self, rows: int) -> torch.Tensor:
        size = bucket_for(rows)
        with self._lock:
            shelf = self._shelves[size]
            self.lent += 1
            if shelf:
                return shelf.pop()
        return torch.empty(size, self.width, dtype=self.dtype)

    def restore(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self.lent -= 1
            self._shelves[tensor.shape[0]].append(tensor)

    def obtain_zeroed(self, rows: int) -> torch.Tensor:
        tensor = self.obtain(rows)  # clean: handed to the caller
        tensor.zero_()
        return tensor


def pad_rows(pool: StagingPool, vectors: Sequence[Sequence[float]]) -> torch.Tensor:
    """Copies vectors into a pooled tensor; whoever calls must restore it."""
    staged = pool.obtain_zeroed(len(vectors))  # clean: handed to the caller
    for row, vector in enumerate(vectors):
        staged[row, : len(vector)] = torch.tensor(vector)
    return staged
