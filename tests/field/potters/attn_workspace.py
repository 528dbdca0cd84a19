"""Attention workspaces: pooled scratch tensors with layered helpers on top."""
from __future__ import annotations

import math
from typing import Dict, Iterator, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class Scratch:
    """Stand-in for a flat device tensor."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data = [0.0] * numel

    def clone(self, n: int) -> List[float]:
        return self.data[:n]


class WorkspacePool:
    def __init__(self) -> None:
        self._bins: Dict[int, List[Scratch]] = {}
        self.live = 0

    def lend(self, numel: int) -> Scratch:
        size = 1 << max(4, (numel - 1).bit_length())
        self.live += 1
        shelf = self._bins.setdefault(size, [])
        return shelf.pop() if shelf else Scratch(size)

    def restore(self, scratch: Scratch) -> None:
        self.live -= 1
        self._bins[scratch.numel].append(scratch)


class Lent:
    """Owns one scratch for the length of a with block or until release."""

    def __init__(self, pool: WorkspacePool, numel: int) -> None:
        self.pool = pool
        self.scratch: Optional[Scratch] = pool.lend(numel)  # clean: held by the object, release restores it

    def release(self) -> None:
        if self.scratch is not None:
            self.pool.restore(self.scratch)
            self.scratch = None

    def __enter__(self) -> "Lent":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


class Planner:
    def __init__(self, pool: WorkspacePool, head_dim: int) -> None:
        self.pool = pool
        self.head_dim = head_dim

    def _logits(self, q: List[float], k: List[float]) -> Scratch:
        out = self.pool.lend(len(k))  # clean: returned
        for i, kv in enumerate(k):
            out.data[i] = sum(q) * kv / math.sqrt(self.head_dim)
        return out

    def _scores(self, q: List[float], k: List[float], causal: int) -> Scratch:
        logits = self._logits(q, k)  # clean: near miss, edited in place and handed on
        for i in range(causal, len(k)):
            logits.data[i] = -math.inf
        return logits

    def _softmax(self, q: List[float], k: List[float], causal: int) -> Scratch:
        scores = self._scores(q, k, causal)  # leak: replaced by a fresh scratch, the scores are not restored
        top = max(scores.data[:len(k)])
        probs = self.pool.lend(len(k))  # clean: returned
        for i in range(len(k)):
            probs.data[i] = math.exp(scores.data[i] - top)
        return probs

    def attend(self, q: List[float], k: List[float], v: List[float], causal: int) -> float:
        probs = self._softmax(q, k, causal)  # clean: restored after the sum
        total = sum(probs.data[:len(k)])
        out = sum(p * x for p, x in zip(probs.data, v)) / total
        self.pool.restore(probs)
        return out

    def debug_scores(self, q: List[float], k: List[float]) -> List[float]:
        return self._scores(q, k, len(k)).clone(len(k))  # leak: cloned, the temporary is never restored

    def lse(self, q: List[float], k: List[float]) -> float:
        scores = self._scores(q, k, len(k))  # clean: restored in finally
        try:
            top = max(scores.data[:len(k)])
            if top == -math.inf:
                return top
            return top + math.log(sum(math.exp(s - top) for s in scores.data[:len(k)]))
        finally:
            self.pool.restore(scores)

    def merge(self, parts: List[Tuple[List[float], List[float]]]) -> List[float]:
        acc: Optional[Scratch] = None
        for q, k in parts:
            cur = self._logits(q, k)  # clean: near miss, the accumulator or restored after it was added
            if acc is None:
                acc = cur
                continue
            for i in range(len(k)):
                acc.data[i] += cur.data[i]
            self.pool.restore(cur)
        if acc is None:
            return []
        out = acc.clone(len(parts[0][1]))
        self.pool.restore(acc)
        return out

    def split_kv(self, q: List[float], k: List[float], splits: int) -> List[float]:
        partial: Dict[int, Scratch] = {}
        step = -(-len(k) // splits)
        for i in range(0, len(k), step):
            partial[i] = self._logits(q, k[i:i + step])  # leak: splits whose maximum is not positive are deleted without restore
        for i in list(partial):
            if max(partial[i].data) <= 0.0:
                del partial[i]
        out = [max(s.data) for s in partial.values()]
        for s in partial.values():
            self.pool.restore(s)
        return out

    def with_lent(self, n: int, fused: bool) -> int:
        lent = Lent(self.pool, n)  # leak: the fused way returns without release
        if fused:
            return n
        size = lent.scratch.numel
        lent.release()
        return size
