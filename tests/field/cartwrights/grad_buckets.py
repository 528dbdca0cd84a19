"""Bucketed gradient reduction with recycled flat buffers.

Gradients are packed into flat buckets of a fixed size and reduced while the
backward pass goes on.  The flat tensors come from ``FlatBufferPool``;
``BucketReducer`` is what the training loop talks to.
"""

import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
import torch.nn as nn

logger = logging.getLogger("train.reducer")


class OverflowDetected(ArithmeticError):
    """A bucket holds inf or nan; the step has to be skipped."""


class FlatBufferPool:
    def __init__(self, numel: int, dtype: torch.dtype = torch.float32, cap: int = 32) -> None:
        self.numel = numel
        self.dtype = dtype
        self.cap = cap
        self.created = 0
        self._spare: Dict[torch.device, List[torch.Tensor]] = defaultdict(list)
        self._lent: Set[int] = set()

    def rent(self, device: torch.device) -> torch.Tensor:
        spare = self._spare[device]
        if spare:
            flat = spare.pop().zero_()  # clean: zero_ works in place and returns the same tensor, which is lent
        elif self.created >= self.cap:
            raise RuntimeError("gradient buffers exhausted")
        else:
            self.created += 1
            flat = torch.zeros(self.numel, dtype=self.dtype, device=device)
        self._lent.add(id(flat))
        return flat

    def rent_as(self, device: torch.device, dtype: torch.dtype) -> Optional[torch.Tensor]:
        """A spare buffer as a tensor of another dtype."""
        spare = self._spare[device]
        if not spare:
            return None
        flat = spare.pop()  # leak: to() with another dtype makes a new tensor, and the pooled one is left behind
        flat = flat.to(dtype)
        self._lent.add(id(flat))
        return flat

    def retire(self, flat: torch.Tensor) -> None:
        if id(flat) not in self._lent:
            logger.warning("ignoring a tensor of shape %s that is not ours", tuple(flat.shape))
            return
        self._lent.remove(id(flat))
        self._spare[flat.device].append(flat)


@dataclass
class Bucket:
    index: int
    params: List[nn.Parameter] = field(default_factory=list)
    offsets: List[int] = field(default_factory=list)
    pending: int = 0
    flat: Optional[torch.Tensor] = None

    def total(self) -> int:
        return sum(p.numel() for p in self.params)


class Work:
    """Handle of an asynchronous reduction with completion callbacks."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._callbacks: List[Callable[[torch.Tensor], None]] = []

    def on_done(self, fn: Callable[[torch.Tensor], None]) -> None:
        self._callbacks.append(fn)

    def finish(self) -> None:
        for fn in self._callbacks:
            fn(self.flat)
        self._callbacks.clear()


def all_reduce(flat: torch.Tensor, world: int) -> Work:
    flat.div_(world)
    return Work(flat)


class BucketReducer:
    def __init__(self, model: nn.Module, pool: FlatBufferPool, world: int) -> None:
        self.pool = pool
        self.world = world
        self.buckets: List[Bucket] = []
        self._owner: Dict[nn.Parameter, Tuple[Bucket, int]] = {}
        self._inflight: List[Work] = []
        self._residual: Dict[int, torch.Tensor] = {}
        self._assign([p for p in model.parameters() if p.requires_grad])

    def _assign(self, params: List[nn.Parameter]) -> None:
        bucket = Bucket(0)
        for p in reversed(params):
            if bucket.params and bucket.total() + p.numel() > self.pool.numel:
                self.buckets.append(bucket)
                bucket = Bucket(len(self.buckets))
            self._owner[p] = (bucket, len(bucket.params))
            bucket.offsets.append(bucket.total())
            bucket.params.append(p)
        self.buckets.append(bucket)

    # Backward pass --------------------------------------------------------

    def install_hooks(self) -> None:
        for p in self._owner:
            p.register_post_accumulate_grad_hook(self._on_grad)

    def _on_grad(self, p: nn.Parameter) -> None:
        bucket, slot = self._owner[p]
        if bucket.flat is None:
            bucket.flat = self.pool.rent(p.device)  # clean: only rented while the bucket has none, and _launch passes it on
            bucket.pending = len(bucket.params)
        start = bucket.offsets[slot]
        bucket.flat[start : start + p.numel()].copy_(p.grad.flatten())
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        flat, bucket.flat = bucket.flat, None
        work = all_reduce(flat, self.world)
        work.on_done(partial(self._scatter, bucket))
        work.on_done(self.pool.retire)
        self._inflight.append(work)

    def _scatter(self, bucket: Bucket, flat: torch.Tensor) -> None:
        for p, start in zip(bucket.params, bucket.offsets):
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))

    def wait(self) -> None:
        while self._inflight:
            self._inflight.pop().finish()

    # Synchronous variants ---------------------------------------------------

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        flat = self.pool.rent(bucket.params[0].device)  # clean: returned to the caller in packed form
        for p, start in zip(bucket.params, bucket.offsets):
            if p.grad is not None:
                flat[start : start + p.numel()].copy_(p.grad.flatten())
        return flat

    def reduce_now(self, bucket: Bucket) -> None:
        flat = self._pack(bucket)  # clean: the second callback retires the very tensor that was packed
        work = all_reduce(flat, self.world)
        work.on_done(partial(self._scatter, bucket))
        work.on_done(self.pool.retire)
        work.finish()

    def reduce_checked(self) -> bool:
        """Reduce all buckets; False when the step overflowed."""
        for bucket in self.buckets:
            flat = self._pack(bucket)  # leak: the overflow branch returns without retiring the packed buffer
            if not torch.isfinite(flat).all():
                logger.warning("overflow in bucket %d", bucket.index)
                return False
            all_reduce(flat, self.world).finish()
            self._scatter(bucket, flat)
            self.pool.retire(flat)
        return True

    def grad_norm(self) -> float:
        total = 0.0
        for bucket in self.buckets:
            flat = self._pack(bucket)  # leak: the name is bound to the product before retire, which ignores the foreign tensor
            flat = flat * flat
            total += float(flat.sum())
            self.pool.retire(flat)
        return math.sqrt(total)

    def clip(self, limit: float) -> float:
        worst = 0.0
        for bucket in self.buckets:
            flat = self._pack(bucket)  # clean: abs_ works in place, the name still means the rented tensor
            flat = flat.abs_()
            worst = max(worst, float(flat.max()))
            self.pool.retire(flat)
        if worst > limit:
            for p in self._owner:
                if p.grad is not None:
                    p.grad.mul_(limit / worst)
        return worst

    def grads_on_host(self) -> List[torch.Tensor]:
        return [self._pack(b).cpu().clone() for b in self.buckets]  # leak: clones are kept, the packed buffers are dropped

    # Error feedback ---------------------------------------------------------

    def _check(self, flat: torch.Tensor) -> None:
        if torch.isnan(flat).any():
            raise OverflowDetected("nan in residual")

    def accumulate_residual(self, bucket: Bucket) -> None:
        fresh = self._pack(bucket)  # clean: either it is added to the old residual and retired, or it becomes the residual
        old = self._residual.get(bucket.index)
        if old is not None:
            old.add_(fresh)
            self.pool.retire(fresh)
            return
        self._residual[bucket.index] = fresh

    def apply_residual(self, bucket: Bucket, scale: float) -> bool:
        residual = self._residual.pop(bucket.index, None)
        if residual is None:
            return False
        try:
            self._check(residual)
            self._scatter(bucket, residual.mul_(scale))
        finally:
            self.pool.retire(residual)
        return True

    def compress(self, bucket: Bucket, keep: int) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        flat = self._pack(bucket)  # leak: the raise of _check is turned into None by the handler, past the retire
        try:
            self._check(flat)
            values, index = torch.topk(flat.abs(), keep)
            self.pool.retire(flat)
        except OverflowDetected:
            return None
        return values, index

    def state_dict(self) -> Dict[str, Any]:
        return {str(k): v.clone() for k, v in self._residual.items()}

    def load_state_dict(self, state: Dict[str, torch.Tensor]) -> None:
        while self._residual:
            _, flat = self._residual.popitem()
            self.pool.retire(flat)
        for key, value in state.items():
            flat = self.pool.rent(value.device)  # clean: the table was emptied first, so no entry is overwritten
            flat[: value.numel()].copy_(value)
            self._residual[int(key)] = flat
