"""Gradient bucketing: flat buckets lent out per parameter group and reduced asynchronously."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Callable, DefaultDict, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn


class FlatPool:
    """Flat buckets rounded to powers of two."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: DefaultDict[int, List[torch.Tensor]] = defaultdict(list)
        self.lent = 0

    @staticmethod
    def _round(n: int) -> int:
        return 1 << max(10, (n - 1).bit_length())

    def rent(self, numel: int) -> torch.Tensor:
        spare = self._spare[self._round(numel)]
        flat = spare.pop() if spare else torch.empty(self._round(numel), device=self.device)  # clean: returned
        self.lent += 1
        return flat

    def hand_in(self, flat: torch.Tensor) -> None:
        self.lent -= 1
        self._spare[flat.numel()].append(flat)


@dataclass(eq=False)
class Bucket:
    flat: torch.Tensor
    params: List[nn.Parameter] = field(default_factory=list)
    filled: int = 0
    work: Optional[object] = None

    def views(self) -> List[torch.Tensor]:
        out, off = [], 0
        for p in self.params:
            out.append(self.flat[off : off + p.numel()].view_as(p))
            off += p.numel()
        return out


class BucketReducer:
    def __init__(self, params: List[nn.Parameter], cap: int, pool: FlatPool) -> None:
        self.pool = pool
        self.cap = cap
        self.params = params
        self._current: Optional[Bucket] = None
        self._flying: List[Bucket] = []
        self._residuals: Dict[int, torch.Tensor] = {}
        self._static: Optional[torch.Tensor] = None

    def add(self, p: nn.Parameter) -> None:
        if p.numel() > self.cap:
            self._reduce_big(p)
            return
        b = self._current
        if b is not None and b.filled + p.numel() > self.cap:
            self._launch()
            b = None
        if b is None:
            b = Bucket(self.pool.rent(self.cap))  # clean: near miss, the full one was launched before
            self._current = b
        b.flat[b.filled : b.filled + p.numel()].copy_(p.grad.reshape(-1))
        b.params.append(p)
        b.filled += p.numel()

    def _launch(self) -> None:
        b, self._current = self._current, None
        if b is None:
            return
        b.work = dist.all_reduce(b.flat[: b.filled], async_op=True)
        self._flying.append(b)

    def _reduce_big(self, p: nn.Parameter) -> None:
        flat = self.pool.rent(p.numel())  # leak: a gradient-free parameter returns without handing in
        if p.grad is None:
            return
        flat[: p.numel()].copy_(p.grad.reshape(-1))
        dist.all_reduce(flat[: p.numel()])
        p.grad.copy_(flat[: p.numel()].view_as(p))
        self.pool.hand_in(flat)

    def finish(self) -> None:
        self._launch()
        world = dist.get_world_size()
        while self._flying:
            b = self._flying.pop(0)  # clean: handed in after the copy
            b.work.wait()
            for p, v in zip(b.params, b.views()):
                p.grad.copy_(v.div_(world))
            self.pool.hand_in(b.flat)

    def discard(self) -> None:
        for b in self._flying:
            b.work.wait()
            self.pool.hand_in(b.flat)
        self._flying.clear()
        if self._current is not None:
            self.pool.hand_in(self._current.flat)
            self._current = None

    def residual(self, p: nn.Parameter) -> torch.Tensor:
        key = id(p)
        if key not in self._residuals:
            self._residuals[key] = self.pool.rent(p.numel()).zero_()  # clean: near miss, only when absent, reset hands in
        return self._residuals[key][: p.numel()].view_as(p)

    def reset_residual(self, p: nn.Parameter) -> None:
        self._residuals[id(p)] = self.pool.rent(p.numel()).zero_()  # leak: replaces the residual still held for p

    def reset(self) -> None:
        for flat in self._residuals.values():
            self.pool.hand_in(flat)
        self._residuals.clear()

    def static_buffer(self, numel: int) -> torch.Tensor:
        if self._static is not None and self._static.numel() >= numel:
            return self._static
        if self._static is not None:
            self.pool.hand_in(self._static)
        self._static = self.pool.rent(numel)  # clean: near miss, the smaller one is handed in first
        return self._static

    def close(self) -> None:
        self.discard()
        self.reset()
        if self._static is not None:
            self.pool.hand_in(self._static)
            self._static = None


def compress_topk(reducer: BucketReducer, p: nn.Parameter, k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    work = reducer.pool.rent(p.numel())  # clean: handed in after selecting
    acc = work[: p.numel()].view_as(p)
    torch.add(p.grad, reducer.residual(p), out=acc)
    values, idx = acc.reshape(-1).abs().topk(k)
    values = acc.reshape(-1)[idx].clone()
    reducer.pool.hand_in(work)
    return values, idx


def clip_by_norm(pool: FlatPool, params: List[nn.Parameter], limit: float) -> float:
    norms = pool.rent(len(params))  # leak: norms under the limit return before hand_in
    for i, p in enumerate(params):
        norms[i] = p.grad.norm()
    total = norms[: len(params)].norm().item()
    if total <= limit:
        return total
    for p in params:
        p.grad.mul_(limit / (total + 1e-6))
    pool.hand_in(norms)
    return total


def accumulate(pool: FlatPool, p: nn.Parameter, closure: Callable[[], torch.Tensor], steps: int) -> None:
    total = pool.rent(p.numel())  # clean: near miss, a break still reaches hand_in
    view = total[: p.numel()].view_as(p).zero_()
    for _ in range(steps):
        loss = closure()
        if not torch.isfinite(loss):
            break
        (g,) = torch.autograd.grad(loss, [p])
        view.add_(g)
    p.grad = view.clone()
    pool.hand_in(total)


def agree(pool: FlatPool, flags: List[bool]) -> bool:
    votes = pool.rent(len(flags))  # leak: all-true comes back early
    votes[: len(flags)].copy_(torch.tensor(flags, dtype=votes.dtype))
    dist.all_reduce(votes[: len(flags)], op=dist.ReduceOp.MIN)
    if bool(votes[: len(flags)].all()):
        return True
    pool.hand_in(votes)
    return False
