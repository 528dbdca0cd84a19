"""Handlers of the embedding service."""
from __future__ import annotations

from typing import Optional, Sequence

import torch

from .staging import StagingPool, pad_rows


class Encoder:
    def __init__(self, pool: StagingPool, model: torch.nn.Module) -> None:
        self.pool = pool
        self.model = model

    def encode(self, vectors: Sequence[Sequence[float]]) -> torch.Tensor:
        """Result is a pooled tensor of the caller's."""
        staged = pad_rows(self.pool, vectors)  # clean: restored after the result is written
        result = self.pool.obtain(len(vectors))  # clean: handed to the caller
        result.copy_(self.model(staged))
        self.pool.restore(staged)
        return result

    def normalise(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        scratch = self.pool.obtain(rows)  # leak: the quotient is a new tensor, scratch is dropped
        scratch[:rows] = tensor[:rows] ** 2
        norms = scratch[:rows].sum(dim=1, keepdim=True).sqrt()
        return tensor[:rows] / norms.clamp_min(1e-6)


class EmbeddingHandler:
    def __init__(self, encoder: Encoder, limit: int = 512) -> None:
        self.encoder = encoder
        self.limit = limit
        self.served = 0

    def embed_one(self, vector: Sequence[float]) -> torch.Tensor:
        pooled = self.encoder.encode([vector])  # leak: cloned, the pooled tensor is never restored
        self.served += 1
        return pooled[0].clone()

    def similarity(self, left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> torch.Tensor:
        a = self.encoder.encode(left)  # clean: restored below
        b = self.encoder.encode(right)  # leak: restored only where both sides have the same length
        scores = a[: len(left)] @ b[: len(right)].T
        self.encoder.pool.restore(a)
        if len(left) == len(right):
            self.encoder.pool.restore(b)
        return scores

    def rerank(self, query: Sequence[float], docs: Sequence[Sequence[float]], top: int) -> list[int]:
        pool = self.encoder.pool
        q = self.encoder.encode([query])  # clean: near miss, the loop restores the list
        held = [q]
        scores: list[float] = []
        for start in range(0, len(docs), 32):
            part = self.encoder.encode(docs[start : start + 32])  # clean: near miss, kept in held
            held.append(part)
            scores.extend((part[: len(docs[start : start + 32])] @ q[0]).tolist())
        for tensor in held:
            pool.restore(tensor)
        return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:top]

    def deduplicate(self, docs: Sequence[Sequence[float]], threshold: float) -> list[int]:
        kept: list[int] = []
        best = None
        for index, doc in enumerate(docs):
            current = self.encoder.encode([doc])  # leak: best is rebound to the next one, the old one is lost
            if best is not None and float(current[0] @ best[0]) > threshold:
                self.encoder.pool.restore(current)
                continue
            kept.append(index)
            best = current
        if best is not None:
            self.encoder.pool.restore(best)
        return kept

    def drift(self, docs: Sequence[Sequence[float]]) -> float:
        total = 0.0
        previous: Optional[torch.Tensor] = None
        for doc in docs:
            current = self.encoder.encode([doc])  # clean: near miss, previous is restored before it is rebound
            if previous is not None:
                total += float((current[0] - previous[0]).norm())
                self.encoder.pool.restore(previous)
            previous = current
        if previous is not None:
            self.encoder.pool.restore(previous)
        return total
