"""Bucketed gradient reduction with overlap.

Flat buffers are reused between steps. A communicator allows a bounded number
of collectives in flight; each `post` yields a token that `settle` gives back.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FlatBuffers:
    def __init__(self, device: torch.device, sizes: Iterable[int]):
        self.slabs = {n: torch.empty(n, device=device) for n in sizes}
        self.in_use = {n: False for n in self.slabs}

    def rent(self, numel: int) -> Optional[Tensor]:
        """The smallest unused slab that holds `numel` elements."""
        for n in sorted(self.slabs):
            if n >= numel and not self.in_use[n]:
                self.in_use[n] = True
                return self.slabs[n]
        return None

    def unrent(self, slab: Tensor) -> None:
        self.in_use[slab.numel()] = False


class Comm:
    def __init__(self, group, max_inflight: int):
        self.group = group
        self.max_inflight = max_inflight
        self.inflight = 0

    def post(self) -> Optional[int]:
        if self.inflight == self.max_inflight:
            return None
        self.inflight += 1
        return self.inflight

    def settle(self) -> None:
        self.inflight -= 1

    def world(self) -> int:
        return dist.get_world_size(self.group)


@dataclass
class Bucket:
    params: List[nn.Parameter]
    flat: Optional[Tensor] = None
    work: Optional[dist.Work] = None
    pending: int = 0
    meta: Dict[str, float] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


class Reducer:
    def __init__(self, buckets: List[Bucket], bufs: FlatBuffers, comm: Comm, clip: float = 0.0):
        self.buckets = buckets
        self.bufs = bufs
        self.comm = comm
        self.clip = clip
        self.owner = {id(p): b for b in buckets for p in b.params}
        self.norms: List[float] = []

    # hooks

    def start_step(self) -> None:
        for b in self.buckets:
            b.pending = len(b.params)

    def on_grad(self, p: nn.Parameter) -> None:
        b = self.owner[id(p)]
        b.pending -= 1
        if b.pending == 0:
            self.launch(b)

    def flatten(self, b: Bucket) -> Optional[Tensor]:
        flat = self.bufs.rent(b.numel)  # clean: returned to the caller
        if flat is None:
            return None
        off = 0
        for p in b.params:
            flat[off : off + p.numel()].copy_(p.grad.view(-1))
            off += p.numel()
        return flat

    def launch(self, b: Bucket) -> None:
        if self.comm.post() is None:  # clean: near miss, settled by finish_step() when there is work and at once when there is none
            self._reduce_now(b)
            return
        b.flat = self.flatten(b)  # clean: moved to the bucket, finish_step() returns it
        if b.flat is None:
            self.comm.settle()
            self._reduce_now(b)
            return
        b.work = dist.all_reduce(b.flat, group=self.comm.group, async_op=True)

    def _reduce_now(self, b: Bucket) -> None:
        for p in b.params:
            dist.all_reduce(p.grad, group=self.comm.group)
            p.grad.div_(self.comm.world())

    def finish_step(self) -> None:
        for b in self.buckets:
            if b.work is None:
                continue
            b.work.wait()
            self._scatter(b, b.flat)
            self.bufs.unrent(b.flat)
            self.comm.settle()
            b.work = b.flat = None

    def _scatter(self, b: Bucket, flat: Tensor) -> None:
        off = 0
        for p in b.params:
            p.grad.copy_(flat[off : off + p.numel()].view_as(p)).div_(self.comm.world())
            off += p.numel()

    # norms

    def grad_norm(self) -> float:
        total = 0.0
        for b in self.buckets:
            flat = self.flatten(b)  # clean: near miss, unrented on the non-finite exit as well
            if flat is None:
                total += sum(float(p.grad.norm()) ** 2 for p in b.params)
                continue
            part = float(flat[: b.numel].norm())
            self.bufs.unrent(flat)
            if not math.isfinite(part):
                return part
            total += part**2
        return math.sqrt(total)

    def check_finite(self) -> bool:
        for b in self.buckets:
            flat = self.flatten(b)  # leak: the first bucket with a NaN returns False with its slab rented
            if flat is None:
                continue
            if not torch.isfinite(flat[: b.numel]).all():
                return False
            self.bufs.unrent(flat)
        return True

    def snapshot(self, b: Bucket) -> Optional[Tensor]:
        flat = self.flatten(b)  # leak: the clone is returned and the slab dropped
        return None if flat is None else flat[: b.numel].clone()

    def largest(self) -> float:
        return max(self.flatten(b).abs().max().item() for b in self.buckets)  # leak: each slab is reduced to a number and dropped

    # compression

    def compress(self, b: Bucket, out: Optional[Tensor] = None) -> Optional[Tensor]:
        """1-bit compression into `out`, or into a rented slab the caller then owns."""
        dst = out
        if dst is None:
            dst = self.bufs.rent(b.numel)  # clean: near miss, rented only without out and then the caller's
        if dst is None:
            return None
        off = 0
        for p in b.params:
            dst[off : off + p.numel()].copy_(p.grad.view(-1).sign())
            off += p.numel()
        return dst

    def reduce_compressed(self, b: Bucket, scratch: Optional[Tensor] = None) -> bool:
        rented = scratch is None
        packed = self.compress(b, scratch)  # leak: rented is tested only on the success way, not when the collective slots are full
        if packed is None:
            return False
        if self.comm.post() is None:  # clean: settled after the collective
            return False
        dist.all_reduce(packed, group=self.comm.group)
        self._scatter(b, packed)
        self.comm.settle()
        if rented:
            self.bufs.unrent(packed)
        return True

    # deferred work, resolved by the communicator's completion thread

    def reduce_later(self, b: Bucket, on_done: Callable[[Bucket], None]) -> bool:
        flat = self.flatten(b)  # clean: near miss, the closure given to the future unrents it
        if flat is None:
            return False
        work = dist.all_reduce(flat, group=self.comm.group, async_op=True)

        def resolved(_fut) -> None:
            self._scatter(b, flat)
            self.bufs.unrent(flat)
            on_done(b)

        work.get_future().then(resolved)
        return True

    def broadcast_later(self, b: Bucket, src: int) -> bool:
        if self.comm.post() is None:  # leak: the callback records the time and nobody settles
            return False
        work = dist.broadcast(b.params[0].data, src, group=self.comm.group, async_op=True)
        work.get_future().then(lambda fut: b.meta.__setitem__("bcast_done", 1.0))
        return True
