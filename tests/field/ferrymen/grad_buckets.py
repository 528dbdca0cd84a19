"""Gradient bucketing for data-parallel training: flat buffers, hook-driven fills, overlapped all-reduce."""
from __future__ import annotations

import collections
import logging
import threading
from dataclasses import dataclass, field
from typing import Optional

import torch
import torch.distributed as dist

log = logging.getLogger("ddp.buckets")


class FlatBufferPool:
    """Flat one-dimensional buffers, kept by (dtype, rounded size)."""

    def __init__(self, device: torch.device, capacity: int, round_to: int = 1 << 16) -> None:
        self.device = device
        self.capacity = capacity
        self.round_to = round_to
        self.in_use = 0
        self._free: dict[tuple, list[torch.Tensor]] = collections.defaultdict(list)
        self._mu = threading.Lock()

    def _key(self, numel: int, dtype: torch.dtype) -> tuple:
        rounded = -(-numel // self.round_to) * self.round_to
        return dtype, rounded

    def try_checkout(self, numel: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        key = self._key(numel, dtype)
        with self._mu:
            if self.in_use + key[1] > self.capacity:
                return None
            self.in_use += key[1]
            shelf = self._free[key]
            if shelf:
                return shelf.pop()
        return torch.empty(key[1], dtype=dtype, device=self.device)

    def checkout(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buf = self.try_checkout(numel, dtype)  # clean: handed to the caller, or None
        if buf is None:
            raise MemoryError(f"flat buffers: {numel} x {dtype} over capacity {self.capacity}")
        return buf

    def checkin(self, buf: torch.Tensor) -> None:
        with self._mu:
            self.in_use -= buf.numel()
            self._free[(buf.dtype, buf.numel())].append(buf)


@dataclass
class Bucket:
    index: int
    params: list
    dtype: torch.dtype
    pending: int = 0
    spans: list = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


def pack(pool: FlatBufferPool, bucket: Bucket) -> torch.Tensor:
    flat = pool.checkout(bucket.numel, bucket.dtype)  # clean: the caller gets it
    offset = 0
    bucket.spans.clear()
    for p in bucket.params:
        n = p.numel()
        view = flat[offset:offset + n]
        if p.grad is None:
            view.zero_()
        else:
            view.copy_(p.grad.reshape(-1))
        bucket.spans.append((offset, n))
        offset += n
    return flat


def unpack(flat: torch.Tensor, bucket: Bucket, scale: float) -> None:
    for p, (offset, n) in zip(bucket.params, bucket.spans):
        if p.grad is not None:
            p.grad.copy_(flat[offset:offset + n].view_as(p.grad)).mul_(scale)


class BucketReducer:
    def __init__(self, pool: FlatBufferPool, buckets: list[Bucket], group=None) -> None:
        self.pool = pool
        self.buckets = buckets
        self.group = group
        self.world = dist.get_world_size(group)
        self._inflight: dict[int, tuple] = {}
        self._shadow: Optional[torch.Tensor] = None
        self.history: list[float] = []

    # synchronous path ---------------------------------------------------------------------------
    def bucket_norm(self, bucket: Bucket, kind: float = 2.0) -> float:
        flat = pack(self.pool, bucket)  # leak: only the number leaves, the flat buffer is dropped
        used = flat[:bucket.numel]
        if kind == float("inf"):
            value = used.abs().max().item()
        else:
            value = used.norm(kind).item()
        self.history.append(value)
        return value

    def reduce_rows(self, bucket: Bucket, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Reduce only touched rows of an embedding; the union of rows may outgrow the first estimate."""
        staging = self.pool.checkout(rows.numel() * width, bucket.dtype)  # leak: rebound when rows grow
        count = torch.tensor([rows.numel()], device=self.pool.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.group)
        needed = int(count.item()) * width
        if needed > staging.numel():
            staging = self.pool.checkout(needed, bucket.dtype)  # clean: checked in at the end
        staging[:needed].zero_()
        dist.all_reduce(staging[:needed], group=self.group)
        out = staging[:rows.numel() * width].clone().view(-1, width)
        self.pool.checkin(staging)
        return out

    def reduce_padded(self, bucket: Bucket, multiple: int) -> torch.Tensor:
        buf = self.pool.checkout(bucket.numel, bucket.dtype)  # clean: near miss, given back before rebinding
        padded = -(-bucket.numel // multiple) * multiple
        if padded > buf.numel():
            self.pool.checkin(buf)
            buf = self.pool.checkout(padded, bucket.dtype)  # clean: checked in in finally
        try:
            buf[bucket.numel:padded].zero_()
            dist.all_reduce(buf[:padded], group=self.group)
            return buf[:bucket.numel].clone()
        finally:
            self.pool.checkin(buf)

    # overlapped path ----------------------------------------------------------------------------
    def launch(self, bucket: Bucket) -> None:
        flat = pack(self.pool, bucket)  # clean: near miss, waits in _inflight until finish()
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self._inflight[bucket.index] = (work, flat, bucket)

    def launch_quantized(self, bucket: Bucket) -> bool:
        codes = self.pool.try_checkout(bucket.numel, torch.uint8)  # leak: lost when scales are refused
        if codes is None:
            log.debug("bucket %d: no room for codes, going dense", bucket.index)
            self.launch(bucket)
            return False
        scales = self.pool.try_checkout(len(bucket.params), torch.float32)  # clean: checked in below
        if scales is None:
            self.launch(bucket)
            return False
        for i, p in enumerate(bucket.params):
            scales[i] = 0.0 if p.grad is None else p.grad.abs().max()
        dist.all_reduce(scales, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(codes, group=self.group)
        self.pool.checkin(scales)
        self.pool.checkin(codes)
        return True

    def finish(self) -> int:
        done = 0
        while self._inflight:
            _, (work, flat, bucket) = self._inflight.popitem()
            work.wait()
            unpack(flat, bucket, 1.0 / self.world)
            self.pool.checkin(flat)
            done += 1
        return done

    def settle_unused(self, unused: list) -> int:
        """Parameters that saw no backward still take part in the reduction, with zeros."""
        sent = 0
        for p in unused:
            zeros = self.pool.checkout(p.numel(), p.dtype)  # leak: continue skips the check-in
            zeros.zero_()
            dist.all_reduce(zeros, group=self.group)
            if p.grad is None:
                continue
            p.grad.copy_(zeros[:p.numel()].view_as(p.grad))
            self.pool.checkin(zeros)
            sent += 1
        return sent

    # local SGD ----------------------------------------------------------------------------------
    def remember(self, bucket: Bucket) -> None:
        """Keep the weights of this round, to be averaged against at the next."""
        self._shadow = self.pool.checkout(bucket.numel, bucket.dtype)  # leak: overwrites the last round's
        offset = 0
        for p in bucket.params:
            self._shadow[offset:offset + p.numel()].copy_(p.data.reshape(-1))
            offset += p.numel()

    def warm(self, rounds: int = 2) -> None:
        """Touch the allocator before the first step, so that the first step is not the slow one."""
        for _ in range(rounds):
            held = [self.pool.checkout(b.numel, b.dtype) for b in self.buckets]  # clean: the loop gives back
            for buf in held:
                buf.zero_()
            for buf in held:
                self.pool.checkin(buf)

    def close(self) -> None:
        self.finish()
        if self._shadow is not None:
            self.pool.checkin(self._shadow)
            self._shadow = None
