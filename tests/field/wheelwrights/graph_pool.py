"""CUDA graphs for the ranker's forward pass, pooled by batch bucket.

A captured graph owns static input and output tensors, so only one request may use
it at a time.  `GraphPool.checkout` returns a slot for the smallest bucket that fits,
`GraphPool.checkin` takes it back.  Static inputs are shared by several graphs and
are counted by reference.
"""
from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Callable, Iterator

import torch

BUCKETS = (8, 32, 128, 512)


class StaticInputs:
    def __init__(self, bucket: int, width: int) -> None:
        self.bucket = bucket
        self.dense = torch.zeros(bucket, width, device="cuda")
        self.refs = 0

    def retain(self) -> "StaticInputs":
        self.refs += 1
        return self

    def unref(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.dense = None


class GraphSlot:
    def __init__(self, bucket: int, graph, inputs: StaticInputs, output: torch.Tensor) -> None:
        self.bucket = bucket
        self.graph = graph
        self.inputs = inputs
        self.output = output
        self.poisoned = False


class GraphPool:
    def __init__(self, model: torch.nn.Module, width: int) -> None:
        self.model = model
        self.width = width
        self._idle: dict[int, deque[GraphSlot]] = {b: deque() for b in BUCKETS}
        self._inputs: dict[int, StaticInputs] = {}
        self._cv = threading.Condition()
        self._mempool = None

    def _shared_inputs(self, bucket: int) -> StaticInputs:
        if bucket not in self._inputs:
            self._inputs[bucket] = StaticInputs(bucket, self.width)
        return self._inputs[bucket].retain()  # clean: the reference goes to the caller

    def capture(self, bucket: int) -> GraphSlot | None:
        inputs = self._shared_inputs(bucket)  # leak: reference kept when the capture raises and None is returned
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._mempool):
                output = self.model(inputs.dense)
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return GraphSlot(bucket, graph, inputs, output)

    def warm(self, per_bucket: int) -> None:
        for bucket in BUCKETS:
            for _ in range(per_bucket):
                slot = self.capture(bucket)  # clean: put on the idle list
                if slot is None:
                    break
                self._idle[bucket].append(slot)

    def checkout(self, n: int, timeout: float = 1.0) -> GraphSlot | None:
        bucket = next((b for b in BUCKETS if b >= n), None)
        if bucket is None:
            return None
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle[bucket], timeout):
                return None
            return self._idle[bucket].popleft()  # clean: returned to the caller

    def checkout_any(self, n: int) -> GraphSlot | None:
        """Take from a larger bucket rather than wait."""
        with self._cv:
            for b in BUCKETS:
                while b >= n and self._idle[b]:
                    slot = self._idle[b].popleft()  # clean: near miss, poisoned slots are retired on purpose
                    if slot.poisoned:
                        self._retire(slot)
                        continue
                    return slot
        return None

    def _retire(self, slot: GraphSlot) -> None:
        slot.graph.reset()
        slot.inputs.unref()

    def checkin(self, slot: GraphSlot) -> None:
        with self._cv:
            if slot.poisoned:
                self._retire(slot)
            else:
                self._idle[slot.bucket].append(slot)
            self._cv.notify()

    @contextlib.contextmanager
    def slot(self, n: int) -> Iterator[GraphSlot]:
        s = self.checkout(n)  # clean: checked in by the finally around yield
        if s is None:
            raise TimeoutError(n)
        try:
            yield s
        finally:
            self.checkin(s)

    @contextlib.contextmanager
    def maybe_slot(self, n: int) -> Iterator[GraphSlot | None]:
        s = self.checkout(n, timeout=0.0)  # leak: not checked in when the body raises RuntimeError
        try:
            yield s
        except RuntimeError:
            if s is not None:
                s.poisoned = True
            raise
        if s is not None:
            self.checkin(s)


class GraphRunner:
    def __init__(self, pool: GraphPool, eager: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.pool = pool
        self.eager = eager
        self.replays = 0

    def score(self, dense: torch.Tensor) -> torch.Tensor:
        n = dense.shape[0]
        with self.pool.slot(n) as s:  # clean: with block
            s.inputs.dense[:n].copy_(dense)
            s.graph.replay()
            return s.output[:n].clone()

    def score_or_eager(self, dense: torch.Tensor) -> torch.Tensor:
        n = dense.shape[0]
        slot = self.pool.checkout(n, timeout=0.002)  # leak: eager fallback for a wrong width keeps the slot
        if slot is None:
            return self.eager(dense)
        if dense.shape[1] != slot.inputs.dense.shape[1]:
            return self.eager(dense)
        slot.inputs.dense[:n].copy_(dense)
        slot.graph.replay()
        out = slot.output[:n].clone()
        self.pool.checkin(slot)
        return out

    def score_chunked(self, dense: torch.Tensor, chunk: int) -> torch.Tensor:
        outs = []
        slot = None
        for part in dense.split(chunk):
            n = part.shape[0]
            if slot is None or slot.bucket < n:
                if slot is not None:
                    self.pool.checkin(slot)
                slot = self.pool.checkout_any(n)  # clean: near miss, the previous one is checked in and the last below
                if slot is None:
                    outs.append(self.eager(part))
                    continue
            slot.inputs.dense[:n].copy_(part)
            slot.graph.replay()
            outs.append(slot.output[:n].clone())
        if slot is not None:
            self.pool.checkin(slot)
        return torch.cat(outs)

    def _replay(self, dense: torch.Tensor) -> GraphSlot:
        n = dense.shape[0]
        slot = self.pool.checkout(n, timeout=5.0)  # clean: handed to the caller with its output filled
        if slot is None:
            raise TimeoutError(n)
        slot.inputs.dense[:n].copy_(dense)
        slot.graph.replay()
        self.replays += 1
        return slot

    def topk(self, dense: torch.Tensor, k: int) -> torch.Tensor:
        return self._replay(dense).output[: dense.shape[0]].topk(k, dim=0).indices.clone()  # leak: the slot itself is dropped

    def calibrate(self, samples: list[torch.Tensor]) -> list[float]:
        means = []
        for x in samples:
            s = self._replay(x)  # leak: break on a NaN output leaves the slot out
            mean = s.output[: x.shape[0]].mean().item()
            if mean != mean:
                s.poisoned = True
                break
            means.append(mean)
            self.pool.checkin(s)
        return means
