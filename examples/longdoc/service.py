"""The embedding service: warm-up, batches, statistics."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from .encoder import LongDocEncoder
from .memory_pool import TensorMemoryPool, get_memory_pool
from .scratch import pairwise_distances


class EmbeddingService:
    """Embeds documents of different lengths in padded batches; safe to call from several threads."""

    def __init__(self, model: LongDocEncoder, pool: TensorMemoryPool | None = None) -> None:
        self.model = model.eval()
        self.memory_pool = pool or get_memory_pool()
        self._lock = threading.Lock()
        self.served = 0

    def warm_up(self, lengths: Sequence[int], dim: int) -> None:
        """Let the pool reserve what the first batches will need."""
        for length in sorted(lengths, reverse=True):
            self.memory_pool.allocate((1, length, dim))

    def embed(self, documents: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, documents))
        ids = self.memory_pool.try_allocate((len(documents), longest), torch.long)
        owned = ids is not None
        if ids is None:
            ids = torch.empty((len(documents), longest), dtype=torch.long)
        try:
            ids.zero_()
            for row, document in zip(ids, documents, strict=True):
                row[: len(document)] = torch.tensor(document)
            with self._lock:
                self.served += len(documents)
                return self.model(ids)
        finally:
            if owned:
                self.memory_pool.deallocate(ids)

    def nearest(self, documents: Sequence[Sequence[int]]) -> list[int]:
        """For each document the other one that is most like it."""
        vectors = self.embed(documents)
        distances = pairwise_distances(self.memory_pool, vectors, vectors)
        return distances.fill_diagonal_(float("inf")).argmin(1).tolist()
