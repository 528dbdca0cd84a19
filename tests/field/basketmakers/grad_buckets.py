"""Gradient buckets for overlapped all-reduce; flat buffers are cached by (numel, dtype)."""
from __future__ import annotations

import logging
from typing import Any, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class FlatCache:
    """fetch() always gives a tensor, stow() takes it back; `out` counts those handed out."""

    def __init__(self, device: torch.device, cap: int = 32):
        self.device = device
        self.cap = cap
        self.out = 0
        self._by_shape: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def fetch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.out += 1
        bin_ = self._by_shape.get((numel, dtype))
        if bin_:
            return bin_.pop()
        return torch.empty(numel, dtype=dtype, device=self.device)

    def fetch_zeroed(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        t = self.fetch(numel, dtype)  # clean: returned to the caller
        t.zero_()
        return t

    def fetch_like(self, ref: torch.Tensor, pad_to: int = 1) -> torch.Tensor:
        t = self.fetch(ref.numel(), ref.dtype)  # leak: rebound to the padded tensor when padding is needed
        if ref.numel() % pad_to:
            t = self.fetch(-(-ref.numel() // pad_to) * pad_to, ref.dtype)  # clean: returned to the caller
        return t

    def stow(self, t: torch.Tensor) -> None:
        self.out -= 1
        bin_ = self._by_shape.setdefault((t.numel(), t.dtype), [])
        if len(bin_) < self.cap:
            bin_.append(t)


class CommSem:
    """Bounds how many collectives are in flight."""

    def __init__(self, n: int):
        self.n = n
        self.busy = 0

    def enter(self) -> bool:
        if self.busy >= self.n:
            return False
        self.busy += 1
        return True

    def leave(self) -> None:
        self.busy -= 1


class Bucket:
    def __init__(self, params: list[torch.nn.Parameter]):
        self.params = params
        self.numel = sum(p.numel() for p in params)
        self.flat: Optional[torch.Tensor] = None
        self.work: Any = None
        self.owns_flat = False


class BucketReducer:
    def __init__(self, cache: FlatCache, sem: CommSem, group=None, fp32_reduce: bool = False):
        self.cache = cache
        self.sem = sem
        self.group = group
        self.fp32_reduce = fp32_reduce
        self.in_flight: list[Bucket] = []

    def _pack(self, b: Bucket) -> torch.Tensor:
        flat = self.cache.fetch(b.numel, b.params[0].dtype)  # clean: returned to the caller
        at = 0
        for p in b.params:
            flat[at:at + p.numel()].copy_(p.grad.view(-1))
            at += p.numel()
        return flat

    def _unpack(self, b: Bucket, flat: torch.Tensor) -> None:
        at = 0
        for p in b.params:
            p.grad.view(-1).copy_(flat[at:at + p.numel()])
            at += p.numel()

    def start(self, b: Bucket) -> bool:
        if not self.sem.enter():  # clean: drain() leaves once for each bucket in flight
            return False
        b.flat = self._pack(b)  # clean: held by the bucket in flight, stowed by drain()
        b.owns_flat = True
        b.work = dist.all_reduce(b.flat, group=self.group, async_op=True)
        self.in_flight.append(b)
        return True

    def start_external(self, b: Bucket, flat: torch.Tensor) -> bool:
        """The caller keeps flat."""
        if not self.sem.enter():  # leak: single-parameter buckets return without leave()
            return False
        if len(b.params) == 1:
            dist.all_reduce(b.params[0].grad, group=self.group)
            return True
        b.flat, b.owns_flat = flat, False
        b.work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.in_flight.append(b)
        return True

    def drain(self) -> None:
        while self.in_flight:
            b = self.in_flight.pop()
            b.work.wait()
            self._unpack(b, b.flat)
            if b.owns_flat:
                self.cache.stow(b.flat)
            b.flat = b.work = None
            self.sem.leave()

    def reduce_blocking(self, b: Bucket) -> None:
        if not self.sem.enter():  # clean: left in finally
            raise RuntimeError("too many collectives")
        try:
            flat = self._pack(b)  # clean: stowed after unpack
            dist.all_reduce(flat, group=self.group)
            self._unpack(b, flat)
            self.cache.stow(flat)
        finally:
            self.sem.leave()

    def reduce_mixed(self, b: Bucket) -> None:
        flat = self._pack(b)  # clean: near miss, stowed here or as src after the cast
        wide = None
        if self.fp32_reduce:
            wide = self.cache.fetch(b.numel, torch.float32)  # clean: near miss, the None test mirrors the flag
            wide.copy_(flat)
        dist.all_reduce(flat if wide is None else wide, group=self.group)
        if wide is not None:
            flat.copy_(wide)
            self.cache.stow(wide)
        self._unpack(b, flat)
        self.cache.stow(flat)

    def reduce_scaled(self, b: Bucket, scale: float) -> bool:
        flat = self._pack(b)  # leak: not stowed when the grads hold inf
        flat.mul_(scale)
        if not torch.isfinite(flat).all():
            logger.warning("inf in bucket of %d params", len(b.params))
            return False
        dist.all_reduce(flat, group=self.group)
        self._unpack(b, flat)
        self.cache.stow(flat)
        return True

    def local_amax(self, b: Bucket) -> float:
        return float(self._pack(b).abs().max())  # leak: the packed tensor is dropped with the expression

    def gather_into(self, shards: list[torch.Tensor], full: torch.Tensor) -> None:
        tmp = self.cache.fetch_zeroed(full.numel(), full.dtype)  # leak: the numel mismatch returns before stow()
        at = 0
        for s in shards:
            if at + s.numel() > tmp.numel():
                return
            tmp[at:at + s.numel()].copy_(s.view(-1))
            at += s.numel()
        full.view(-1).copy_(tmp)
        self.cache.stow(tmp)

    def broadcast_state(self, tensors: dict[str, torch.Tensor], src: int) -> None:
        staged: dict[str, torch.Tensor] = {}
        for name, t in tensors.items():
            staged[name] = self.cache.fetch_like(t, pad_to=8)  # clean: near miss, the loop below stows all of staged
            staged[name][: t.numel()].copy_(t.view(-1))
        for buf in staged.values():
            dist.broadcast(buf, src=src, group=self.group)
        for name, buf in staged.items():
            tensors[name].view(-1).copy_(buf[: tensors[name].numel()])
            self.cache.stow(buf)
