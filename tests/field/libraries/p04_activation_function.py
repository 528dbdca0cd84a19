"""Activation buffers borrowed for the length of a forward/backward pair."""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ActivationPool:
    def __init__(self) -> None:
        self._shelves: "OrderedDict[Tuple, List[Tensor]]" = OrderedDict()
        self._borrowed: Dict[int, Tuple] = {}
        self._lk = threading.RLock()
        self.misses = 0

    @staticmethod
    def _signature(shape, dtype: torch.dtype, device: torch.device) -> Tuple:
        return tuple(shape), dtype, str(device)

    def borrow(self, like: Tensor) -> Tensor:
        sig = self._signature(like.shape, like.dtype, like.device)
        with self._lk:
            shelf = self._shelves.get(sig)
            if shelf:
                t = shelf.pop()  # clean: recorded as borrowed and handed out
            else:
                self.misses += 1
                t = torch.empty_like(like, memory_format=torch.contiguous_format)
            self._borrowed[t.data_ptr()] = sig
            return t

    def give_back(self, t: Optional[Tensor]) -> None:
        if t is None:
            return
        with self._lk:
            sig = self._borrowed.pop(t.data_ptr(), None)
            if sig is not None:
                self._shelves.setdefault(sig, []).append(t.view(sig[0]))


POOL = ActivationPool()


class PooledGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        saved = POOL.borrow(x)  # clean: moved into ctx, given back in backward
        saved.copy_(x)
        ctx.saved = saved
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        saved = ctx.saved
        ctx.saved = None
        with torch.enable_grad():
            x = saved.detach().requires_grad_(True)
            y = F.gelu(x)
        (gx,) = torch.autograd.grad(y, x, grad)
        POOL.give_back(saved)
        return gx


class PooledSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.gate = POOL.borrow(gate)  # clean: given back in backward
        ctx.up = POOL.borrow(up)  # leak: backward gives back the gate only
        ctx.gate.copy_(gate)
        ctx.up.copy_(up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tuple[Tensor, Tensor]:
        gate, up = ctx.gate, ctx.up
        sig = torch.sigmoid(gate)
        act = gate * sig
        d_gate = grad * up * (sig + act * (1 - sig))
        d_up = grad * act
        POOL.give_back(gate)
        ctx.gate = ctx.up = None
        return d_gate, d_up


class PooledDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float, training: bool) -> Tensor:
        ctx.active = training and p > 0.0
        if not ctx.active:
            return x.view_as(x)
        mask = POOL.borrow(x)  # clean: near miss, ctx.active holds exactly when the mask was stored
        mask.bernoulli_(1.0 - p).div_(1.0 - p)
        ctx.mask = mask
        return x * mask

    @staticmethod
    def backward(ctx, grad: Tensor):
        if not ctx.active:
            return grad, None, None
        gx = grad * ctx.mask
        POOL.give_back(ctx.mask)
        ctx.mask = None
        return gx, None, None


class PooledLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = POOL.borrow(x)  # leak: backward returns early without giving it back when x needs no gradient
        mean = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
        torch.mul(x - mean, rstd, out=normed)
        ctx.normed = normed
        ctx.rstd = rstd
        ctx.weight = weight
        return normed * weight

    @staticmethod
    def backward(ctx, grad: Tensor):
        normed, rstd, weight = ctx.normed, ctx.rstd, ctx.weight
        gw = (grad * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, gw, None
        g = grad * weight
        gx = (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) * rstd
        POOL.give_back(normed)
        return gx, gw, None


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, p: float = 0.0, use_pool: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.p = p
        self.use_pool = use_pool

    def forward(self, x: Tensor) -> Tensor:
        if self.use_pool:
            h = PooledSwiGLU.apply(self.gate(x), self.up(x))
        else:
            h = F.silu(self.gate(x)) * self.up(x)
        return self.down(PooledDropout.apply(h, self.p, self.training))

    @torch.no_grad()
    def probe(self, x: Tensor) -> Dict[str, float]:
        h = self.up(x)
        stats = POOL.borrow(h)  # clean: given back before the return
        torch.abs(h, out=stats)
        report = {"mean": float(stats.mean()), "max": float(stats.max())}
        POOL.give_back(stats)
        return report

    @torch.no_grad()
    def outliers(self, x: Tensor, limit: float) -> Tensor:
        h = self.up(x)
        mags = POOL.borrow(h)  # leak: the name is rebound to a boolean mask and that is what is given back
        torch.abs(h, out=mags)
        mags = mags > limit
        idx = mags.nonzero()
        POOL.give_back(mags)
        return idx

    @torch.no_grad()
    def clipped(self, x: Tensor, limit: float) -> Tensor:
        h = self.up(x)
        work = POOL.borrow(h)  # clean: near miss, the finally clause covers both returns
        try:
            work.copy_(h)
            if float(work.abs().max()) <= limit:
                return self.down(h)
            work.clamp_(-limit, limit)
            return self.down(work)
        finally:
            POOL.give_back(work)


@torch.no_grad()
def ema_update(target: Tensor, source: Tensor, decay: float) -> Tensor:
    mix = POOL.borrow(source)  # leak: copied into the target and then dropped
    torch.lerp(source, target, decay, out=mix)
    target.copy_(mix)
    return target
