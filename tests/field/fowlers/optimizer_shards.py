"""Sharded optimizer state: full parameters are gathered on demand and counted references hold them."""
from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Iterable, Optional, Sequence

import torch
import torch.distributed as dist

_FLAT: dict[int, list[torch.Tensor]] = {}
_FLAT_OUT = 0


def _class_of(n: int) -> int:
    return 1 << max(10, math.ceil(math.log2(max(n, 1))))


def borrow_flat(n: int) -> torch.Tensor:
    """A flat float buffer of at least n elements; goes back by return_flat."""
    global _FLAT_OUT
    size = _class_of(n)
    shelf = _FLAT.setdefault(size, [])
    _FLAT_OUT += 1
    return shelf.pop() if shelf else torch.empty(size)


def return_flat(buf: torch.Tensor) -> None:
    global _FLAT_OUT
    _FLAT_OUT -= 1
    _FLAT.setdefault(buf.numel(), []).append(buf)


class ShardedParam:
    """This rank's shard of a parameter, and the full one while somebody holds it."""

    def __init__(self, name: str, shard: torch.Tensor, world: int) -> None:
        self.name, self.shard, self.world = name, shard, world
        self._full: Optional[torch.Tensor] = None
        self._holders = 0

    def hold(self) -> torch.Tensor:
        if self._holders == 0:
            self._full = borrow_flat(self.shard.numel() * self.world)  # clean: near miss, unhold returns it at zero
            dist.all_gather_into_tensor(self._full[: self.shard.numel() * self.world], self.shard)
        self._holders += 1
        return self._full[: self.shard.numel() * self.world]

    def unhold(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            return_flat(self._full)
            self._full = None

    @property
    def resident(self) -> bool:
        return self._full is not None


@contextmanager
def gathered(params: Sequence[ShardedParam]):
    views = [p.hold() for p in params]  # clean: all are let go in the finally
    try:
        yield views
    finally:
        for p in params:
            p.unhold()


def reduce_shard(grad: torch.Tensor, world: int) -> torch.Tensor:
    """This rank's part of the summed gradient, in a borrowed buffer."""
    part = borrow_flat(grad.numel() // world)  # clean: handed on to the caller
    dist.reduce_scatter_tensor(part[: grad.numel() // world], grad)
    return part


def full_norm(params: Sequence[ShardedParam]) -> float:
    with gathered(params) as views:  # clean: left with the block
        return float(sum(v.pow(2).sum() for v in views).sqrt())


def shard_grad_norm(grads: Iterable[torch.Tensor], world: int) -> float:
    total = torch.zeros(())
    for g in grads:
        part = reduce_shard(g, world)  # leak: rebound in each round, never returned
        total += part[: g.numel() // world].pow(2).sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def clip_param(p: ShardedParam, bound: float) -> bool:
    full = p.hold()  # leak: a norm within the bound returns without unhold
    norm = float(full.norm())
    if norm <= bound:
        return False
    p.shard.mul_(bound / norm)
    p.unhold()
    return True


def weight_decay(p: ShardedParam, rate: float, skip_one_dim: bool) -> None:
    held = not (skip_one_dim and p.name.endswith((".bias", ".scale")))
    if held:
        full = p.hold()  # clean: near miss, the flag guards the end too
        p.shard.sub_(full[: p.shard.numel()], alpha=rate)
    if held:
        p.unhold()


def tie_weights(a: ShardedParam, b: ShardedParam) -> bool:
    fa = a.hold()  # clean: let go on both ways
    fb = b.hold()  # leak: parameters of unequal size let go of the first only
    if fa.numel() != fb.numel():
        a.unhold()
        return False
    b.shard.copy_(a.shard)
    same = bool(torch.equal(fa, fb))
    a.unhold()
    b.unhold()
    return same


def sum_into(dst: Optional[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The accumulated buffer and whether the caller owns it."""
    if dst is not None:
        dst[: grad.numel()].add_(grad)
        return dst, False
    buf = borrow_flat(grad.numel())  # clean: near miss, the flag tells the caller that he owns it
    buf[: grad.numel()].copy_(grad)
    return buf, True


def micro_average(grads: Sequence[torch.Tensor], dst: Optional[torch.Tensor] = None) -> torch.Tensor:
    buf, owned = sum_into(dst, grads[0])  # clean: near miss, returned where it is owned
    for g in grads[1:]:
        buf[: g.numel()].add_(g)
    mean = buf[: grads[0].numel()] / len(grads)
    if owned:
        return_flat(buf)
    return mean


def micro_peak(grads: Sequence[torch.Tensor]) -> float:
    buf, _owned = sum_into(None, grads[0].abs())  # leak: owned here, since there is no dst, and not returned
    for g in grads[1:]:
        torch.maximum(buf[: g.numel()], g.abs(), out=buf[: g.numel()])
    return float(buf[: grads[0].numel()].max())


class AdamShard:
    """Moments of one parameter; the pool's buffers back them."""

    def __init__(self, p: ShardedParam, lr: float) -> None:
        self.p, self.lr, self.step_no = p, lr, 0
        n = p.shard.numel()
        self._m = borrow_flat(n)  # clean: near miss, retire returns it
        self._v = borrow_flat(n)  # leak: retire returns only the first moment
        self._m.zero_()
        self._v.zero_()

    def step(self, grad: torch.Tensor) -> None:
        self.step_no += 1
        n = self.p.shard.numel()
        m, v = self._m[:n], self._v[:n]
        m.lerp_(grad, 0.1)
        v.lerp_(grad * grad, 0.01)
        self.p.shard.addcdiv_(m, v.sqrt().add_(1e-8), value=-self.lr)

    def retire(self) -> None:
        return_flat(self._m)
        self._m = None
        self._v = None
