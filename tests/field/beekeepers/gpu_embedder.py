"""Embedding service: batches of token ids through a model, with staging tensors from a pool."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Optional, Sequence

import torch


class StagingPool:
    """Pinned host tensors by bucket size. take() lends one, give() returns it."""

    def __init__(self, buckets: Sequence[int], per_bucket: int, dim: int) -> None:
        self.dim = dim
        self.buckets = sorted(buckets)
        self._lock = threading.Lock()
        self._free = {b: [torch.empty(b, dim) for _ in range(per_bucket)] for b in self.buckets}

    def bucket_for(self, rows: int) -> int:
        for bucket in self.buckets:
            if rows <= bucket:
                return bucket
        raise ValueError("batch of %d rows is too large" % rows)

    def take(self, rows: int) -> torch.Tensor:
        bucket = self.bucket_for(rows)
        with self._lock:
            stack = self._free[bucket]
            if stack:
                return stack.pop()
        return torch.empty(bucket, self.dim)

    def take_or_none(self, rows: int) -> Optional[torch.Tensor]:
        bucket = self.bucket_for(rows)
        with self._lock:
            stack = self._free[bucket]
            return stack.pop() if stack else None

    def give(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._free[tensor.shape[0]].append(tensor)


@dataclass
class EmbedRequest:
    ident: str
    ids: list[int]
    done: threading.Event = field(default_factory=threading.Event)
    staging: Optional[torch.Tensor] = None
    answer: Optional[torch.Tensor] = None
    cancelled: bool = False


class Embedder:
    def __init__(self, model, pool: StagingPool, device: str = "cuda") -> None:
        self.model = model
        self.pool = pool
        self.device = device

    def forward_into(self, ids: list[int]) -> torch.Tensor:
        """Pooled tensor with the embeddings in its first rows. The caller gives it back."""
        out = self.pool.take(len(ids))  # clean: returned to the caller
        with torch.no_grad():
            hidden = self.model(torch.tensor(ids, device=self.device))
        out[: len(ids)].copy_(hidden)
        return out

    def embed(self, ids: list[int]) -> torch.Tensor:
        rows = self.forward_into(ids)  # clean: copied out, then given back
        result = rows[: len(ids)].clone()
        self.pool.give(rows)
        return result

    def embed_mean(self, ids: list[int]) -> torch.Tensor:
        rows = self.forward_into(ids)  # leak: the mean is returned, the pooled rows are dropped
        return rows[: len(ids)].mean(dim=0)

    def embed_text(self, tokenizer, text: str) -> list[float]:
        ids = tokenizer.encode(text)
        vector = self.forward_into(ids)[: len(ids)].sum(dim=0)  # leak: only the sum survives the expression
        return (vector / vector.norm()).tolist()

    def similarity(self, left: list[int], right: list[int]) -> float:
        a = self.forward_into(left)  # clean: given back at the end
        b = self.forward_into(right)  # clean: given back at the end
        score = torch.cosine_similarity(a[: len(left)].mean(0), b[: len(right)].mean(0), dim=0)
        for tensor in (a, b):
            self.pool.give(tensor)
        return float(score)

    def embed_long(self, ids: list[int], window: int) -> torch.Tensor:
        total = torch.zeros(self.pool.dim)
        for start in range(0, len(ids), window):
            part = self.forward_into(ids[start : start + window])  # leak: a tail short of a window breaks out
            if len(ids) - start < window // 4:
                break
            total += part.sum(dim=0)
            self.pool.give(part)
        return total / max(1, len(ids))

    def embed_windows(self, ids: list[int], window: int) -> list[torch.Tensor]:
        parts = []
        for start in range(0, len(ids), window):
            piece = ids[start : start + window]
            parts.append(self.forward_into(piece))  # clean: near miss, the caller owns the list
        return parts

    def embed_max(self, ids: list[int], window: int) -> torch.Tensor:
        parts = self.embed_windows(ids, window)  # clean: each given back by the loop
        best = torch.stack([p.amax(dim=0) for p in parts]).amax(dim=0)
        for part in parts:
            self.pool.give(part)
        return best

    def embed_last(self, ids: list[int], window: int) -> torch.Tensor:
        parts = self.embed_windows(ids, window)  # leak: only the last window goes back
        last = parts[-1]
        vector = last.mean(dim=0)
        self.pool.give(last)
        return vector


class Batcher(threading.Thread):
    """Collects requests and runs them; each request carries its staging tensor."""

    def __init__(self, embedder: Embedder, limit: int) -> None:
        super().__init__(daemon=True)
        self.embedder = embedder
        self.pool = embedder.pool
        self.limit = limit
        self.inbox: queue.Queue[Optional[EmbedRequest]] = queue.Queue()

    def submit(self, request: EmbedRequest) -> bool:
        request.staging = self.pool.take_or_none(len(request.ids))  # leak: run() skips cancelled ones
        if request.staging is None:
            return False
        self.inbox.put(request)
        return True

    def run(self) -> None:
        while True:
            request = self.inbox.get()
            if request is None:
                return
            if request.cancelled:
                request.done.set()
                continue
            hidden = self.embedder.model(torch.tensor(request.ids))
            request.staging[: len(request.ids)].copy_(hidden)
            request.answer = request.staging[: len(request.ids)].clone()
            self.pool.give(request.staging)
            request.staging = None
            request.done.set()


class RollingIndex:
    """Newest embeddings by document; an update swaps the tensor."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self._by_doc: dict[str, torch.Tensor] = {}

    def update(self, doc: str, ids: list[int]) -> None:
        fresh = self.embedder.forward_into(ids)  # clean: near miss, the one it replaces is given back
        stale = self._by_doc.get(doc)
        self._by_doc[doc] = fresh
        if stale is not None:
            self.embedder.pool.give(stale)

    def forget(self, doc: str) -> None:
        tensor = self._by_doc.pop(doc, None)
        if tensor is not None:
            self.embedder.pool.give(tensor)

    def clear(self) -> None:
        for doc in list(self._by_doc):
            self.forget(doc)


class WarmCache:
    """First embedding of a document wins; later ones are for nothing."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self._rows: dict[str, torch.Tensor] = {}

    def ensure(self, doc: str, ids: list[int]) -> torch.Tensor:
        fresh = self.embedder.forward_into(ids)  # leak: setdefault keeps the older one and fresh is dropped
        return self._rows.setdefault(doc, fresh)

    def evict(self, doc: str) -> None:
        rows = self._rows.pop(doc, None)
        if rows is not None:
            self.embedder.pool.give(rows)


def rerank(embedder: Embedder, query: list[int], docs: list[list[int]], keep: int) -> list[int]:
    anchor = embedder.forward_into(query)  # clean: given back before the return
    scores = []
    for number, ids in enumerate(docs):
        if not ids:
            continue
        rows = embedder.forward_into(ids)  # clean: given back in each round
        scores.append((float(torch.dot(anchor.mean(0), rows.mean(0))), number))
        embedder.pool.give(rows)
    embedder.pool.give(anchor)
    scores.sort(reverse=True)
    return [number for _, number in scores[:keep]]
