"""Evaluation harness: asyncio workers that borrow model replicas and scoring buffers."""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pathlib
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

import torch
import torch.nn as nn

logger = logging.getLogger(__name__)


@dataclass
class Replica:
    rank: int
    model: nn.Module
    device: torch.device
    served: int = 0
    sick: bool = False


class ReplicaPool:
    def __init__(self, replicas: list[Replica]):
        self._q: asyncio.Queue[Replica] = asyncio.Queue()
        self.sick: list[Replica] = []
        for r in replicas:
            self._q.put_nowait(r)

    async def borrow(self) -> Replica:
        return await self._q.get()

    def borrow_nowait(self) -> Optional[Replica]:
        try:
            return self._q.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def restore(self, r: Replica) -> None:
        r.served += 1
        if r.sick:
            self.sick.append(r)
        else:
            self._q.put_nowait(r)

    @contextlib.asynccontextmanager
    async def using(self) -> AsyncIterator[Replica]:
        r = await self.borrow()  # clean: restored in finally
        try:
            yield r
        finally:
            self.restore(r)

    async def borrow_fit(self, device_type: str) -> Replica:
        """Waits for a replica on a device of the given type."""
        passed: list[Replica] = []
        while True:
            r = await self._q.get()  # clean: near miss, those of the other type are queued again before the return
            if r.device.type == device_type:
                for p in passed:
                    self._q.put_nowait(p)
                return r
            passed.append(r)
            if self._q.empty():
                for p in passed:
                    self._q.put_nowait(p)
                passed.clear()
                await asyncio.sleep(0.05)

    async def borrow_fresh(self, max_served: int) -> Replica:
        """Passes over replicas that are due for a reload."""
        while True:
            r = await self._q.get()  # leak: a replica over the limit is taken off the queue and dropped
            if r.served < max_served:
                return r
            logger.info("replica %d is due for a reload", r.rank)


class LogitShelf:
    """Scoring buffers by (batch, vocab) on the host."""

    def __init__(self) -> None:
        self._shelf: dict[tuple[int, int], list[torch.Tensor]] = {}

    def obtain(self, batch: int, vocab: int) -> torch.Tensor:
        free = self._shelf.get((batch, vocab))
        return free.pop() if free else torch.empty(batch, vocab)

    def recycle(self, t: torch.Tensor) -> None:
        self._shelf.setdefault((t.size(0), t.size(1)), []).append(t)


@dataclass
class Sample:
    uid: str
    tokens: torch.Tensor
    target: int
    meta: dict[str, Any] = field(default_factory=dict)


class Evaluator:
    def __init__(self, pool: ReplicaPool, shelf: LogitShelf, vocab: int, out_dir: pathlib.Path):
        self.pool = pool
        self.shelf = shelf
        self.vocab = vocab
        self.out_dir = out_dir
        self.failures: list[str] = []

    def _forward(self, replica: Replica, batch: list[Sample]) -> torch.Tensor:
        """Logits of the last position, in a buffer of the shelf."""
        with torch.inference_mode():
            x = torch.stack([s.tokens for s in batch]).to(replica.device)
            last = replica.model(x)[:, -1]
        out = self.shelf.obtain(len(batch), self.vocab)  # clean: returned to the caller
        out.copy_(last)
        return out

    async def accuracy(self, batch: list[Sample]) -> float:
        async with self.pool.using() as replica:  # clean: async with
            logits = self._forward(replica, batch)  # clean: recycled in finally
        try:
            hits = (logits.argmax(-1) == torch.tensor([s.target for s in batch])).sum()
            return float(hits) / max(1, len(batch))
        finally:
            self.shelf.recycle(logits)

    async def perplexity(self, batch: list[Sample]) -> float:
        async with self.pool.using() as replica:  # clean: async with
            nll = self._forward(replica, batch).log_softmax(-1)  # leak: log_softmax makes a new tensor and the buffer is dropped
        picks = nll[torch.arange(len(batch)), torch.tensor([s.target for s in batch])]
        return float((-picks.mean()).exp())

    async def margin(self, batch: list[Sample]) -> Optional[float]:
        replica = await self.pool.borrow()  # leak: an empty batch returns before the restore
        if not batch:
            return None
        try:
            logits = self._forward(replica, batch)  # clean: recycled after the top-2
            top = logits.topk(2, dim=-1).values.clone()
            self.shelf.recycle(logits)
        finally:
            self.pool.restore(replica)
        return float((top[:, 0] - top[:, 1]).mean())

    async def agreement(self, batch: list[Sample]) -> Optional[float]:
        first = await self.pool.borrow()  # leak: not restored when there is no second replica
        second = self.pool.borrow_nowait()  # clean: restored in finally, None is checked
        if second is None:
            return None
        try:
            a = self._forward(first, batch)  # clean: recycled after the comparison
            b = self._forward(second, batch)  # clean: recycled after the comparison
            same = float((a.argmax(-1) == b.argmax(-1)).float().mean())
            self.shelf.recycle(a)
            self.shelf.recycle(b)
            return same
        finally:
            self.pool.restore(second)
            self.pool.restore(first)

    async def run_worker(self, queue: "asyncio.Queue[Optional[list[Sample]]]") -> int:
        done = 0
        while True:
            batch = await queue.get()
            if batch is None:
                return done
            replica = await self.pool.borrow()  # leak: a CUDA out of memory is logged and the loop goes on without it
            try:
                logits = self._forward(replica, batch)  # clean: recycled after the write
            except torch.cuda.OutOfMemoryError:
                logger.warning("oom on %d, batch of %d put off", replica.rank, len(batch))
                self.failures.extend(s.uid for s in batch)
                continue
            rows = logits.argmax(-1).tolist()
            self.shelf.recycle(logits)
            self.pool.restore(replica)
            done += self._write(batch, rows)

    def _write(self, batch: list[Sample], rows: list[int]) -> int:
        with open(self.out_dir / "answers.jsonl", "a") as f:
            for s, r in zip(batch, rows):
                f.write(json.dumps({"uid": s.uid, "answer": r}) + "\n")
        return len(batch)

    async def run_resilient(self, batches: list[list[Sample]]) -> int:
        done = 0
        for batch in batches:
            replica = await self.pool.borrow()  # clean: near miss, a sick one is restored as well, by finally
            try:
                logits = self._forward(replica, batch)  # clean: recycled below, where the forward succeeded
            except RuntimeError:
                replica.sick = True
                self.failures.extend(s.uid for s in batch)
                continue
            finally:
                self.pool.restore(replica)
            rows = logits.argmax(-1).tolist()
            self.shelf.recycle(logits)
            done += self._write(batch, rows)
        return done

    async def spawn(self, batch: list[Sample], score: Callable[[torch.Tensor], Awaitable[float]]) -> "asyncio.Task[float]":
        replica = await self.pool.borrow()  # clean: near miss, the done callback of the task restores it

        async def body() -> float:
            logits = self._forward(replica, batch)  # clean: recycled in finally
            try:
                return await score(logits)
            finally:
                self.shelf.recycle(logits)

        task = asyncio.create_task(body())
        task.add_done_callback(lambda _t: self.pool.restore(replica))
        return task


def ensemble(shelf: LogitShelf, parts: list[torch.Tensor]) -> torch.Tensor:
    acc = shelf.obtain(parts[0].size(0), parts[0].size(1))  # leak: rebound to the sum, the buffer is not recycled
    acc.zero_()
    for p in parts:
        acc = acc + p.softmax(-1)
    return acc / len(parts)
