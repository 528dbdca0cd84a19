"""Gradient bucketing for data-parallel training.

Parameters are grouped into buckets, every bucket is flattened into a buffer that
belongs to a small shared pool, reduced asynchronously and scattered back.
"""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Iterable, List, Optional

import torch

log = logging.getLogger(__name__)


class FlatBufferPool:
    """Fixed set of equally sized flat buffers shared by every bucket of a reducer."""

    def __init__(self, count: int, numel: int, dtype=torch.float32, device="cuda"):
        self.numel = numel
        self._idle = deque(torch.empty(numel, dtype=dtype, device=device) for _ in range(count))
        self._loaned = {}
        self._cv = threading.Condition()

    def take(self) -> torch.Tensor:
        with self._cv:
            while not self._idle:
                self._cv.wait()
            buf = self._idle.popleft()
            self._loaned[id(buf)] = buf
            return buf

    def try_take(self) -> Optional[torch.Tensor]:
        with self._cv:
            if not self._idle:
                return None
            buf = self._idle.popleft()
            self._loaned[id(buf)] = buf
            return buf

    def put_back(self, buf: torch.Tensor) -> None:
        with self._cv:
            self._loaned.pop(id(buf))
            self._idle.append(buf)
            self._cv.notify()


@dataclass
class Bucket:
    index: int
    params: List[torch.nn.Parameter]
    flat: Optional[torch.Tensor] = None
    residual: Optional[torch.Tensor] = None
    pending: int = 0
    work: object = None

    def copy_in(self, param) -> None:
        offset = 0
        for other in self.params:
            if other is param:
                self.flat[offset:offset + param.numel()].copy_(param.grad.view(-1))
                return
            offset += other.numel()

    def scatter(self) -> None:
        offset = 0
        for param in self.params:
            param.grad.copy_(self.flat[offset:offset + param.numel()].view_as(param))
            offset += param.numel()


def partition(params: Iterable[torch.nn.Parameter], limit: int) -> List[Bucket]:
    buckets, current, used = [], [], 0
    for param in reversed(list(params)):
        if current and used + param.numel() > limit:
            buckets.append(Bucket(len(buckets), current, pending=len(current)))
            current, used = [], 0
        current.append(param)
        used += param.numel()
    if current:
        buckets.append(Bucket(len(buckets), current, pending=len(current)))
    return buckets


class Reducer:
    def __init__(self, params, pool: FlatBufferPool, group, *, error_feedback: bool = False):
        self.pool = pool
        self.group = group
        self.world = group.size()
        self.error_feedback = error_feedback
        self.buckets = partition(params, pool.numel)
        self._owner = {p: b for b in self.buckets for p in b.params}

    def mark_ready(self, param) -> None:
        bucket = self._owner[param]
        if bucket.flat is None:
            bucket.flat = self.pool.take()  # clean: near miss, finalize gives back every bucket's flat
        bucket.copy_in(param)
        bucket.pending -= 1
        if bucket.pending == 0:
            bucket.work = self.group.all_reduce(bucket.flat, async_op=True)

    def start_feedback(self) -> None:
        if not self.error_feedback:
            return
        for bucket in self.buckets:
            bucket.residual = self.pool.take()  # leak: finalize resets residual without put_back
            bucket.residual.zero_()

    def finalize(self) -> None:
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
                bucket.scatter()
            if bucket.flat is not None:
                self.pool.put_back(bucket.flat)
                bucket.flat = None
            bucket.residual = None
            bucket.pending = len(bucket.params)

    def reduce_sparse(self, grad: torch.Tensor) -> torch.Tensor:
        values = grad.coalesce().values()
        scratch = self.pool.take()  # leak: the oversize branch returns without put_back
        count = values.numel()
        if count > scratch.numel():
            log.warning("sparse gradient of %d values exceeds the flat buffer, reducing in place", count)
            self.group.all_reduce(values)
            return values
        view = scratch[:count]
        view.copy_(values.view(-1))
        self.group.all_reduce(view)
        values.view(-1).copy_(view)
        self.pool.put_back(scratch)
        return values

    def reduce_chunked(self, grad: torch.Tensor) -> int:
        flat = grad.view(-1)
        rounds = 0
        for start in range(0, flat.numel(), self.pool.numel):
            piece = flat[start:start + self.pool.numel]
            scratch = self.pool.take()  # clean: put back in finally on every round
            try:
                if not piece.any():
                    continue
                view = scratch[:piece.numel()]
                view.copy_(piece)
                self.group.all_reduce(view)
                piece.copy_(view)
                rounds += 1
            finally:
                self.pool.put_back(scratch)
        return rounds

    def _to_wire(self, bucket: Bucket) -> torch.Tensor:
        """Pre-scaled image of the bucket, in a pool buffer that the caller puts back."""
        wire = self.pool.take()  # clean: handed to the caller
        wire.copy_(bucket.flat).div_(self.world)
        return wire

    def reduce_prescaled(self, bucket: Bucket) -> None:
        wire = self._to_wire(bucket)  # clean: put back below
        self.group.all_reduce(wire)
        bucket.flat.copy_(wire)
        self.pool.put_back(wire)

    def wire_norm(self, bucket: Bucket) -> float:
        return float(self._to_wire(bucket).norm())  # leak: the pooled image is read once and dropped

    def snapshot(self, bucket: Bucket) -> torch.Tensor:
        image = self._to_wire(bucket).clone()  # leak: the clone is kept, the pooled image dropped
        image.mul_(self.world)
        return image.cpu()

    def two_stage(self, bucket: Bucket, intra, inter) -> bool:
        """Reduce inside the node, then across nodes; False when buffers are short."""
        local = self.pool.try_take()  # leak: not put back when the second buffer is not available
        if local is None:
            return False
        remote = self.pool.try_take()  # clean: put back at the end, None otherwise
        if remote is None:
            return False
        local.copy_(bucket.flat)
        intra.all_reduce(local)
        remote.copy_(local)
        inter.all_reduce(remote)
        bucket.flat.copy_(remote)
        self.pool.put_back(remote)
        self.pool.put_back(local)
        return True

    def exchange(self, bucket: Bucket, peer: int) -> bool:
        outgoing = self.pool.try_take()  # clean: put back on both ways
        incoming = self.pool.try_take()  # clean: near miss, put back on both ways if it was got
        if outgoing is None or incoming is None:
            for buf in (outgoing, incoming):
                if buf is not None:
                    self.pool.put_back(buf)
            return False
        outgoing.copy_(bucket.flat)
        self.group.send_recv(outgoing, incoming, peer)
        bucket.flat.add_(incoming)
        self.pool.put_back(outgoing)
        self.pool.put_back(incoming)
        return True
