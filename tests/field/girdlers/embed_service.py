"""Embedding service: requests are staged in pooled host tensors, batched, and copied out to the callers."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Optional, Sequence

import torch


class StagingPool:
    """Pinned host tensors of a few fixed widths. alloc() may return None, recycle() takes a tensor back."""

    def __init__(self, widths: Sequence[int], per_width: int, dim: int) -> None:
        self.widths = sorted(widths)
        self.dim = dim
        self._free: dict[int, list[torch.Tensor]] = {
            w: [torch.empty((w, dim)) for _ in range(per_width)] for w in self.widths
        }
        self._lock = threading.Lock()
        self.closed = False

    def alloc(self, rows: int) -> Optional[torch.Tensor]:
        with self._lock:
            for width in self.widths:
                if width >= rows and self._free[width]:
                    return self._free[width].pop()
        return None

    def recycle(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._free[tensor.shape[0]].append(tensor)


@dataclass
class Job:
    tokens: list[list[int]]
    staging: Optional[torch.Tensor] = None
    owns_staging: bool = True
    done: threading.Event = field(default_factory=threading.Event)
    result: list[list[float]] = field(default_factory=list)
    error: str = ""


class Encoder:
    def __init__(self, pool: StagingPool, table: torch.Tensor) -> None:
        self.pool = pool
        self.table = table

    def gather(self, tokens: Sequence[Sequence[int]]) -> Optional[torch.Tensor]:
        """One pooled tensor with a mean vector per row; the caller recycles it."""
        out = self.pool.alloc(len(tokens))  # clean: handed to the caller
        if out is None:
            return None
        for i, row in enumerate(tokens):
            out[i].copy_(self.table[list(row)].mean(dim=0))
        return out

    def encode(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        staged = self.gather(tokens)  # leak: copied into a list and dropped
        if staged is None:
            return []
        return staged[: len(tokens)].clone().tolist()

    def similarity(self, left: Sequence[int], right: Sequence[int]) -> Optional[float]:
        a = self.gather([left])  # leak: not recycled when b could not be allocated
        b = self.gather([right])  # clean: None-checked, recycled with a
        if a is None or b is None:
            if b is not None:
                self.pool.recycle(b)
            return None
        score = float(torch.dot(a[0], b[0]))
        self.pool.recycle(a)
        self.pool.recycle(b)
        return score

    def distance(self, left: Sequence[int], right: Sequence[int]) -> Optional[float]:
        a = self.gather([left])  # clean: recycled in the sweep over both
        b = self.gather([right])  # clean: near miss, recycled in the sweep over both
        value = None
        if a is not None and b is not None:
            value = float((a[0] - b[0]).norm())
        for tensor in (a, b):
            if tensor is not None:
                self.pool.recycle(tensor)
        return value

    def smooth(self, tokens: Sequence[Sequence[int]], rounds: int) -> list[list[float]]:
        """Repeated averaging with the shifted rows, through two tensors in turns."""
        current = self.gather(tokens)  # clean: near miss, every tensor is recycled when it is replaced
        if current is None:
            return []
        for _ in range(rounds):
            following = self.pool.alloc(current.shape[0])  # clean: becomes current
            if following is None:
                break
            torch.add(current, current.roll(1, 0), out=following)
            self.pool.recycle(current)
            current = following
        rows = current[: len(tokens)].tolist()
        self.pool.recycle(current)
        return rows

    def whiten(self, tokens: Sequence[Sequence[int]], mean: torch.Tensor) -> list[list[float]]:
        staged = self.gather(tokens)  # leak: the name is bound to a new tensor, the pooled one is gone
        if staged is None:
            return []
        staged = staged - mean
        return staged[: len(tokens)].tolist()


class Batcher:
    """Threads submit jobs, one worker runs them. A job may bring its own tensor (owns_staging False)."""

    def __init__(self, encoder: Encoder, pool: StagingPool, limit: int) -> None:
        self.encoder = encoder
        self.pool = pool
        self.limit = limit
        self.inbox: queue.Queue[Optional[Job]] = queue.Queue()
        self.rejected = 0

    def submit(self, tokens: list[list[int]]) -> Optional[Job]:
        job = Job(tokens)
        job.staging = self.pool.alloc(len(tokens))  # clean: near miss, the worker settles it
        if job.staging is None:
            return None
        self.inbox.put(job)
        return job

    def submit_small(self, tokens: list[list[int]]) -> Optional[Job]:
        """Short jobs only; longer ones are refused."""
        staging = self.pool.alloc(len(tokens))  # leak: a refused job leaves its tensor outside the pool
        if staging is None:
            return None
        total = sum(len(row) for row in tokens)
        if total > self.limit:
            self.rejected += 1
            return None
        job = Job(tokens, staging)
        self.inbox.put(job)
        return job

    def submit_lent(self, tokens: list[list[int]], tensor: torch.Tensor) -> Job:
        job = Job(tokens, tensor, owns_staging=False)
        self.inbox.put(job)
        return job

    def settle(self, job: Job) -> None:
        if job.owns_staging and job.staging is not None:
            self.pool.recycle(job.staging)
        job.staging = None
        job.done.set()

    def run(self) -> None:
        while True:
            job = self.inbox.get()
            if job is None:
                return
            assert job.staging is not None
            for i, row in enumerate(job.tokens):
                job.staging[i].copy_(self.encoder.table[row].mean(dim=0))
            job.result = job.staging[: len(job.tokens)].tolist()
            self.settle(job)


def bulk(batcher: Batcher, pool: StagingPool, groups: list[list[list[int]]]) -> list[list[list[float]]]:
    """Runs all groups through one tensor, which this function lends to its jobs."""
    widest = max(len(group) for group in groups)
    tensor = pool.alloc(widest)  # leak: lent to jobs that do not own it, and not recycled here either
    if tensor is None:
        return []
    results = []
    for group in groups:
        job = batcher.submit_lent(group, tensor)
        job.done.wait()
        results.append(job.result)
    return results


def single(batcher: Batcher, pool: StagingPool, tokens: list[int]) -> list[float]:
    tensor = pool.alloc(1)  # clean: lent to the job and recycled here when it is done
    if tensor is None:
        return []
    job = batcher.submit_lent([tokens], tensor)
    job.done.wait()
    pool.recycle(tensor)
    return job.result[0]
