"""Flat gradient buckets and the reducer that fills them during backward."""
from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from typing import Deque, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

MIN_BUCKET = 1 << 16


def _size_class(numel: int) -> int:
    size = MIN_BUCKET
    while size < numel:
        size <<= 1
    return size


class BucketPool:
    """Flat fp32 buckets, grouped by power-of-two size. checkout() is None over budget."""

    def __init__(self, device: torch.device, max_numel: int) -> None:
        self.device = device
        self.max_numel = max_numel
        self._used = 0
        self._mu = threading.Lock()
        self._free: Dict[int, List[torch.Tensor]] = defaultdict(list)

    def checkout(self, numel: int) -> Optional[torch.Tensor]:
        size = _size_class(numel)
        with self._mu:
            if self._used + size > self.max_numel:
                return None
            self._used += size
            if self._free[size]:
                return self._free[size].pop()
        return torch.empty(size, dtype=torch.float32, device=self.device)

    def checkin(self, flat: torch.Tensor) -> None:
        with self._mu:
            self._used -= flat.numel()
            self._free[flat.numel()].append(flat)


Inflight = Tuple[dist.Work, torch.Tensor, Sequence[torch.nn.Parameter]]


class Reducer:
    def __init__(self, pool: BucketPool, group=None) -> None:
        self.pool = pool
        self.group = group
        self._inflight: Deque[Inflight] = deque()
        self._accum: Optional[torch.Tensor] = None
        self._master: Optional[torch.Tensor] = None

    # -- asynchronous path -------------------------------------------------

    def queue_bucket(self, params: Sequence[torch.nn.Parameter]) -> bool:
        total = sum(p.numel() for p in params)
        flat = self.pool.checkout(total)  # clean: near miss, moved into _inflight, which drain() empties
        if flat is None:
            for p in params:
                dist.all_reduce(p.grad, group=self.group)
            return False
        self._fill(flat, params)
        work = dist.all_reduce(flat[:total], group=self.group, async_op=True)
        self._inflight.append((work, flat, params))
        return True

    def drain(self) -> int:
        done = 0
        while self._inflight:
            work, flat, params = self._inflight.popleft()
            work.wait()
            self._spread(flat, params)
            self.pool.checkin(flat)
            done += 1
        return done

    # -- synchronous path --------------------------------------------------

    def reduce_sparse(self, params: Sequence[torch.nn.Parameter]) -> int:
        flat = self.pool.checkout(sum(p.numel() for p in params))  # leak: not given back when no parameter has a grad
        if flat is None:
            raise RuntimeError("bucket budget exhausted")
        live = [p for p in params if p.grad is not None]
        if not live:
            return 0
        self._fill(flat, live)
        dist.all_reduce(flat, group=self.group)
        self._spread(flat, live)
        self.pool.checkin(flat)
        return len(live)

    def global_norm(self, params: Sequence[torch.nn.Parameter]) -> float:
        total = sum(p.numel() for p in params)
        flat = self.pool.checkout(total)  # clean: given back in finally
        if flat is None:
            sq = sum(float(p.grad.float().pow(2).sum()) for p in params)
            return sq ** 0.5
        try:
            self._fill(flat, params)
            norm = flat[:total].norm()
            if not torch.isfinite(norm):
                return float("inf")
            return float(norm)
        finally:
            self.pool.checkin(flat)

    def average_two(self, a: Sequence[torch.nn.Parameter], b: Sequence[torch.nn.Parameter]) -> bool:
        left = self.pool.checkout(sum(p.numel() for p in a))  # leak: not given back when right is None
        if left is None:
            return False
        right = self.pool.checkout(sum(p.numel() for p in b))  # clean: given back at the end
        if right is None:
            log.info("no room for the second bucket, falling back")
            return False
        self._fill(left, a)
        self._fill(right, b)
        dist.all_reduce(left, group=self.group)
        dist.all_reduce(right, group=self.group)
        self._spread(left, a)
        self._spread(right, b)
        self.pool.checkin(right)
        self.pool.checkin(left)
        return True

    def compare_replicas(self, params: Sequence[torch.nn.Parameter], src: int) -> Optional[float]:
        total = sum(p.numel() for p in params)
        mine = self.pool.checkout(total)  # clean: given back on both ways out
        if mine is None:
            return None
        theirs = self.pool.checkout(total)  # clean: given back after the difference
        if theirs is None:
            self.pool.checkin(mine)
            return None
        self._fill(mine, params)
        theirs.copy_(mine)
        dist.broadcast(theirs, src=src, group=self.group)
        diff = float((mine[:total] - theirs[:total]).abs().max())
        self.pool.checkin(theirs)
        self.pool.checkin(mine)
        return diff

    # -- packing -----------------------------------------------------------

    def _packed(self, params: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        flat = self.pool.checkout(sum(p.numel() for p in params))  # clean: returned to the caller
        if flat is None:
            raise RuntimeError("bucket budget exhausted")
        self._fill(flat, params)
        return flat

    def snapshot(self, params: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        return self._packed(params).clone()  # leak: the pooled bucket is cloned and dropped

    def checksum(self, params: Sequence[torch.nn.Parameter]) -> float:
        flat = self._packed(params)  # clean: given back after the sum
        value = float(flat.double().sum())
        self.pool.checkin(flat)
        return value

    # -- resident buckets --------------------------------------------------

    def ensure_accum(self, numel: int) -> None:
        if self._accum is None or self._accum.numel() < numel:
            self._accum = self.pool.checkout(numel)  # leak: the smaller bucket is overwritten when a larger is needed

    def ensure_master(self, numel: int) -> None:
        if self._master is not None and self._master.numel() < numel:
            self.pool.checkin(self._master)
            self._master = None
        if self._master is None:
            self._master = self.pool.checkout(numel)  # clean: near miss, the old one is checked in first and close() returns it

    def close(self) -> None:
        self.drain()
        for flat in (self._accum, self._master):
            if flat is not None:
                self.pool.checkin(flat)
        self._accum = self._master = None

    def checkout_aligned(self, numel: int, tries: int = 3) -> Optional[torch.Tensor]:
        for attempt in range(tries):
            flat = self.pool.checkout(numel)  # leak: a misaligned bucket is dropped before the next try
            if flat is None:
                time.sleep(0.01 * (attempt + 1))
                continue
            if flat.data_ptr() % 512 == 0:
                return flat
            log.debug("bucket %x not aligned", flat.data_ptr())
        return None

    def _fill(self, flat: torch.Tensor, params: Sequence[torch.nn.Parameter]) -> None:
        off = 0
        for p in params:
            flat[off:off + p.numel()].copy_(p.grad.view(-1))
            off += p.numel()

    def _spread(self, flat: torch.Tensor, params: Sequence[torch.nn.Parameter]) -> None:
        off = 0
        for p in params:
            p.grad.view(-1).copy_(flat[off:off + p.numel()])
            off += p.numel()
