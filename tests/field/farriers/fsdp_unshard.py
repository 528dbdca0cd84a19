"""Flat-parameter unsharding with a rented all-gather buffer (FSDP1 in spirit, without the wrappers)."""
from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import Iterable, Iterator, Optional

import torch
import torch.distributed as dist
from torch import Tensor


class FlatBufferPool:
    """Recycles full-parameter buffers by (numel, dtype). rent() gives None when the cap on bytes is reached."""

    def __init__(self, cap_bytes: int, device: torch.device):
        self.cap = cap_bytes
        self.device = device
        self.live_bytes = 0
        self._bins: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def rent(self, numel: int, dtype: torch.dtype) -> Optional[Tensor]:
        free = self._bins[(numel, dtype)]
        if free:
            return free.pop()
        size = numel * torch.finfo(dtype).bits // 8
        if self.live_bytes + size > self.cap:
            return None
        self.live_bytes += size
        return torch.empty(numel, dtype=dtype, device=self.device)

    def unrent(self, buf: Tensor) -> None:
        self._bins[(buf.numel(), buf.dtype)].append(buf)


class FlatHandle:
    def __init__(self, local: Tensor, group, pool: FlatBufferPool, reshard_after_forward: bool, param_dtype: torch.dtype):
        self.local = local
        self.group = group
        self.pool = pool
        self.reshard_after_forward = reshard_after_forward
        self.param_dtype = param_dtype
        self.world = dist.get_world_size(group)
        self.full: Optional[Tensor] = None
        self.grad_full: Optional[Tensor] = None
        self._prefetch: Optional[tuple[Tensor, dist.Work]] = None

    @property
    def numel(self) -> int:
        return self.local.numel() * self.world

    def prefetch(self) -> bool:
        if self.full is not None or self._prefetch is not None:
            return False
        buf = self.pool.rent(self.numel, self.param_dtype)  # clean: near miss, kept with its work and taken over by unshard or cancel
        if buf is None:
            return False
        work = dist.all_gather_into_tensor(buf, self.local.to(self.param_dtype), group=self.group, async_op=True)
        self._prefetch = (buf, work)
        return True

    def cancel_prefetch(self) -> None:
        if self._prefetch is None:
            return
        buf, work = self._prefetch
        self._prefetch = None
        work.wait()
        self.pool.unrent(buf)

    def unshard(self) -> bool:
        if self.full is not None:
            return True
        if self._prefetch is not None:
            buf, work = self._prefetch
            self._prefetch = None
            work.wait()
            self.full = buf
            return True
        self.full = self.pool.rent(self.numel, self.param_dtype)  # clean: near miss, the first guard keeps it from overwriting and reshard returns it
        if self.full is None:
            return False
        dist.all_gather_into_tensor(self.full, self.local.to(self.param_dtype), group=self.group)
        return True

    def reshard(self) -> None:
        full, self.full = self.full, None
        if full is not None:
            self.pool.unrent(full)

    def post_forward(self) -> None:
        if self.reshard_after_forward:
            self.reshard()

    def post_backward(self, grad: Tensor) -> None:
        self.reshard()
        acc = self.grad_full
        if acc is None:
            acc = self.pool.rent(self.numel, torch.float32)  # clean: near miss, rented once per accumulation and returned by reduce_grad
            if acc is None:
                raise RuntimeError("gradient buffer over the cap")
            acc.zero_()
            self.grad_full = acc
        acc.add_(grad.reshape(-1))

    def reduce_grad(self) -> Optional[Tensor]:
        acc, self.grad_full = self.grad_full, None
        if acc is None:
            return None
        out = torch.empty_like(self.local, dtype=torch.float32)
        dist.reduce_scatter_tensor(out, acc, group=self.group)
        self.pool.unrent(acc)
        return out

    def set_dtype(self, dtype: torch.dtype) -> None:
        self.param_dtype = dtype
        if self.full is None:
            return
        nxt = self.pool.rent(self.numel, dtype)  # leak: the cast buffer replaces the previous full parameter without returning it
        if nxt is None:
            self.reshard()
            return
        nxt.copy_(self.full)
        self.full = nxt


@contextmanager
def summon(handles: Iterable[FlatHandle], writeback: bool) -> Iterator[list[Tensor]]:
    done: list[FlatHandle] = []
    try:
        for h in handles:
            if h.full is not None:
                continue
            if h.unshard():  # clean: near miss, noted in done and resharded in the finally
                done.append(h)
        yield [h.full for h in done if h.full is not None]
        if writeback:
            for h in done:
                if h.full is not None:
                    h.local.copy_(h.full.chunk(h.world)[dist.get_rank(h.group)])
    finally:
        for h in done:
            h.reshard()


def full_norms(handles: list[FlatHandle]) -> list[float]:
    norms: list[float] = []
    for h in handles:
        buf = h.pool.rent(h.numel, torch.float32)  # leak: a handle with a zero shard is skipped before the unrent
        if buf is None:
            break
        dist.all_gather_into_tensor(buf, h.local.float(), group=h.group)
        norm = float(buf.norm())
        if norm == 0.0:
            continue
        norms.append(norm)
        h.pool.unrent(buf)
    return norms


def _cast_buffer(h: FlatHandle, dtype: torch.dtype) -> Optional[Tensor]:
    buf = h.pool.rent(h.numel, dtype)  # clean: filled and handed to the caller
    if buf is not None:
        dist.all_gather_into_tensor(buf, h.local.to(dtype), group=h.group)
    return buf


def ema_update(h: FlatHandle, ema: Tensor, decay: float) -> bool:
    buf = _cast_buffer(h, torch.float32)  # clean: near miss, the first step copies and unrents as well
    if buf is None:
        return False
    if not ema.any():
        ema.copy_(buf)
    else:
        ema.lerp_(buf, 1.0 - decay)
    h.pool.unrent(buf)
    return True


def export_bf16(h: FlatHandle) -> Optional[Tensor]:
    buf = _cast_buffer(h, torch.bfloat16)  # leak: a clone goes out and the rented buffer is forgotten
    if buf is None:
        return None
    return buf.clone()


def max_drift(h: FlatHandle, other: FlatHandle) -> float:
    a = _cast_buffer(h, torch.float32)  # leak: not unrented when there is no room for the second handle
    b = _cast_buffer(other, torch.float32)  # clean: near miss, its mate being missing returns it on its own
    if a is None:
        if b is not None:
            other.pool.unrent(b)
        return float("nan")
    if b is None:
        return float("nan")
    drift = float((a - b).abs().max())
    h.pool.unrent(a)
    other.pool.unrent(b)
    return drift
