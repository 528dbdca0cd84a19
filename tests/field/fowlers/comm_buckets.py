"""Gradient buckets and the flat communication buffers behind them."""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Optional, Sequence

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class CommBufferPool:
    """A fixed number of flat device buffers, shared by all reducers of a rank."""

    def __init__(self, numel: int, count: int, device: str = "cuda") -> None:
        self.numel = numel
        self._free = deque(torch.empty(numel, device=device) for _ in range(count))
        self._tags: dict[int, str] = {}
        self._cond = threading.Condition()

    def checkout(self, tag: str) -> torch.Tensor:
        with self._cond:
            while not self._free:
                self._cond.wait()
            buf = self._free.popleft()
            self._tags[id(buf)] = tag
            return buf

    def try_checkout(self, tag: str) -> Optional[torch.Tensor]:
        with self._cond:
            if not self._free:
                return None
            buf = self._free.popleft()
            self._tags[id(buf)] = tag
            return buf

    def checkin(self, buf: torch.Tensor) -> None:
        with self._cond:
            self._tags.pop(id(buf), None)
            self._free.append(buf)
            self._cond.notify()

    def outstanding(self) -> list[str]:
        with self._cond:
            return sorted(self._tags.values())


@dataclass
class Bucket:
    index: int
    grads: list[torch.Tensor] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(g.numel() for g in self.grads)


def flatten_into(pool: CommBufferPool, grads: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
    flat = pool.checkout(tag)  # clean: handed on to the caller
    at = 0
    for g in grads:
        n = g.numel()
        flat[at:at + n].copy_(g.reshape(-1))
        at += n
    flat[at:].zero_()
    return flat


def unflatten_from(flat: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
    at = 0
    for g in grads:
        n = g.numel()
        g.copy_(flat[at:at + n].view_as(g))
        at += n


def allreduce_now(pool: CommBufferPool, grads: Sequence[torch.Tensor], group=None) -> None:
    flat = flatten_into(pool, grads, "now")  # clean: checked in by the finally
    try:
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        unflatten_from(flat, grads)
    finally:
        pool.checkin(flat)


def global_grad_norm(pool: CommBufferPool, grads: Sequence[torch.Tensor], group=None) -> float:
    flat = flatten_into(pool, grads, "norm")  # leak: the flat copy is only read and then dropped
    sq = flat.float().pow(2).sum()
    dist.all_reduce(sq, group=group)
    norm = float(sq.sqrt())
    log.debug("grad norm %.4f over %d tensors", norm, len(grads))
    return norm


def allreduce_compressed(pool: CommBufferPool, grads: Sequence[torch.Tensor], group=None) -> bool:
    wide = flatten_into(pool, grads, "wide")  # clean: checked in on both ways
    narrow = pool.checkout("narrow")  # leak: the overflow path checks in only the wide buffer
    amax = wide.abs().max()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    if not torch.isfinite(amax):
        log.warning("overflow before compression, step skipped")
        pool.checkin(wide)
        return False
    half = narrow.view(torch.float16)[: wide.numel()]
    half.copy_(wide / amax)
    dist.all_reduce(half, group=group)
    wide.copy_(half.float() * amax)
    unflatten_from(wide, grads)
    pool.checkin(narrow)
    pool.checkin(wide)
    return True


def broadcast_with_retry(pool, grads, attempts: int, accept: Callable[[torch.Tensor], bool]) -> bool:
    for attempt in range(attempts):
        flat = flatten_into(pool, grads, f"try{attempt}")  # leak: a rejected attempt goes round with its buffer
        dist.broadcast(flat, src=0)
        if not accept(flat):
            log.warning("broadcast attempt %d rejected", attempt)
            continue
        unflatten_from(flat, grads)
        pool.checkin(flat)
        return True
    return False


def opportunistic_sync(pool: CommBufferPool, bucket: Bucket, slow: Callable[[Bucket], None]) -> None:
    flat = pool.try_checkout(f"opp{bucket.index}")  # clean: near miss, None means that nothing was taken
    if flat is None:
        slow(bucket)
        return
    flat[: bucket.numel].copy_(torch.cat([g.reshape(-1) for g in bucket.grads]))
    dist.all_reduce(flat)
    unflatten_from(flat, bucket.grads)
    pool.checkin(flat)


class BucketReducer:
    """Launches buckets while the backward pass runs, waits for all of them at its end."""

    def __init__(self, pool: CommBufferPool, group=None) -> None:
        self._pool = pool
        self._group = group
        self._pending: list[tuple] = []

    def launch(self, bucket: Bucket) -> None:
        flat = flatten_into(self._pool, bucket.grads, f"b{bucket.index}")  # clean: near miss, wait_all checks it in
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._pending.append((work, flat, bucket))

    def wait_all(self, discard: bool = False) -> None:
        while self._pending:
            work, flat, bucket = self._pending.pop()
            work.wait()
            if not discard:
                unflatten_from(flat, bucket.grads)
            self._pool.checkin(flat)


class StaleTolerantReducer:
    """Reduces a step's buckets during the next steps; results that come too late are ignored."""

    def __init__(self, pool: CommBufferPool, group=None, max_lag: int = 1) -> None:
        self._pool = pool
        self._group = group
        self._max_lag = max_lag
        self._inflight: dict[tuple[int, int], tuple] = {}
        self.skipped = 0

    def launch(self, step: int, bucket: Bucket) -> None:
        tag = f"s{step}b{bucket.index}"
        flat = flatten_into(self._pool, bucket.grads, tag)  # leak: collect() pops late results without checking them in
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._inflight[(step, bucket.index)] = (work, flat, bucket)

    def collect(self, step: int) -> None:
        for key in sorted(self._inflight):
            work, flat, bucket = self._inflight.pop(key)
            work.wait()
            if step - key[0] > self._max_lag:
                self.skipped += 1
                continue
            unflatten_from(flat, bucket.grads)
            self._pool.checkin(flat)
