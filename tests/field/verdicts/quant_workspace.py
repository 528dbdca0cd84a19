"""INT8 linear with activations quantised into borrowed workspaces."""
from __future__ import annotations

import torch
from torch import Tensor, nn


class Int8Pool:
    _instance: "Int8Pool | None" = None

    def __init__(self) -> None:
        self._spare: dict[int, list[Tensor]] = {}
        self.hits = 0

    @classmethod
    def instance(cls) -> "Int8Pool":
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def borrow(self, n: int) -> Tensor:
        lst = self._spare.get(n)
        if lst:
            self.hits += 1
            return lst.pop()
        return torch.empty(n, dtype=torch.int8)

    def give_back(self, t: Tensor) -> None:
        self._spare.setdefault(t.numel(), []).append(t.view(-1))


def quantise_into(x: Tensor, out: Tensor) -> Tensor:
    scale = x.abs().amax().clamp_min(1e-8) / 127.0
    out.copy_((x / scale).round().clamp(-127, 127).view(-1))
    return scale


class Int8Linear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None, pool: Int8Pool | None = None) -> None:
        super().__init__()
        self.register_buffer("qweight", weight.round().to(torch.int8))
        self.bias = bias
        self.pool = pool or Int8Pool.instance()
        self._saved: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q = self.pool.borrow(x.numel())  # clean: near miss, q.view is another view of the same storage
        scale = quantise_into(x, q)
        acc = q.view(x.shape).float() @ self.qweight.float().T
        self.pool.give_back(q)
        acc.mul_(scale)
        if self.bias is not None:
            acc += self.bias
        return acc

    def forward_reshaped(self, x: Tensor) -> Tensor:
        q = self.pool.borrow(x.numel())  # clean: near miss, rebound to a view, give_back flattens it again
        scale = quantise_into(x, q)
        q = q.view(x.shape)
        y = (q.float() @ self.qweight.float().T) * scale
        self.pool.give_back(q)
        return y

    def forward_float(self, x: Tensor) -> Tensor:
        q = self.pool.borrow(x.numel())  # leak: q.float() is a new tensor and takes the name
        scale = quantise_into(x, q)
        q = q.float()
        y = q.view(x.shape) @ self.qweight.float().T * scale
        self.pool.give_back(q)
        return y

    def forward_saved(self, x: Tensor) -> Tensor:
        if self._saved is not None:
            self.pool.give_back(self._saved)
        self._saved = self.pool.borrow(x.numel())  # clean: near miss, former one was given back, release() takes the last
        scale = quantise_into(x, self._saved)
        return self._saved.view(x.shape).float() @ self.qweight.float().T * scale

    def release(self) -> None:
        if self._saved is not None:
            self.pool.give_back(self._saved)
            self._saved = None

    def error(self, x: Tensor, ref: Tensor) -> float:
        q = self.pool.borrow(x.numel())  # leak: given back only when the error is below one
        scale = quantise_into(x, q)
        err = float(((q.view(x.shape).float() * scale) @ self.qweight.float().T - ref).abs().max())
        if err < 1.0:
            self.pool.give_back(q)
        return err

    def range_check(self, x: Tensor) -> bool:
        q = self.pool.borrow(x.numel())  # clean: given back on either branch
        quantise_into(x, q)
        if (q == 127).any() or (q == -127).any():
            self.pool.give_back(q)
            return False
        else:
            self.pool.give_back(q)
        return True


class QuantFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, pool: Int8Pool) -> Tensor:
        ctx.pool = pool
        ctx.q = pool.borrow(x.numel())  # clean: near miss, backward gives it back on both of its returns
        ctx.scratch = pool.borrow(w.numel())  # leak: backward never gives the scratch back
        ctx.scale = quantise_into(x, ctx.q)
        ctx.shape = x.shape
        ctx.save_for_backward(w)
        quantise_into(w, ctx.scratch)
        return (ctx.q.view(x.shape).float() * ctx.scale) @ w.T

    @staticmethod
    def backward(ctx, g: Tensor):
        (w,) = ctx.saved_tensors
        gx = g @ w if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            ctx.pool.give_back(ctx.q)
            return gx, None, None
        x = ctx.q.view(ctx.shape).float() * ctx.scale
        gw = g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        ctx.pool.give_back(ctx.q)
        return gx, gw, None


def packed(x: Tensor, pool: Int8Pool) -> tuple[Tensor, Tensor]:
    q = pool.borrow(x.numel())  # clean: first of the returned pair
    return q, quantise_into(x, q)


def histogram(xs: list[Tensor], pool: Int8Pool, bins: int = 16) -> Tensor:
    hist = torch.zeros(bins)
    for x in xs:
        q, scale = packed(x, pool)  # leak: blocks of zeros are passed over with continue
        if not q.any():
            continue
        hist += torch.histc(q.float(), bins=bins, min=-127, max=127)
        pool.give_back(q)
    return hist


def scales(xs: list[Tensor], pool: Int8Pool) -> list[float]:
    return [float(packed(x, pool)[1]) for x in xs]  # leak: only the scale of each pair is used
