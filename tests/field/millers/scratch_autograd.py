"""Fused training ops that save pooled scratch on the autograd context instead of fresh tensors."""
from __future__ import annotations

import math
import weakref
from typing import Any, Dict, List, Optional, Tuple

try:
    import torch
    from torch.autograd import Function
except ImportError:
    torch = None
    Function = object


class ScratchPool:
    """Shape-keyed device scratch. ``rent`` / ``hand_in``; rented scratch holds stale values."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._shelf: Dict[Tuple[Tuple[int, ...], Any], List["torch.Tensor"]] = {}
        self.rented = 0

    def rent(self, shape: Tuple[int, ...], dtype: Any) -> "torch.Tensor":
        self.rented += 1
        shelf = self._shelf.get((tuple(shape), dtype))
        if shelf:
            return shelf.pop()
        return torch.empty(shape, dtype=dtype, device=self.device)

    def rent_like(self, t: "torch.Tensor") -> "torch.Tensor":
        return self.rent(tuple(t.shape), t.dtype)  # clean: handed on to the caller

    def hand_in(self, t: Optional["torch.Tensor"]) -> None:
        if t is None:
            return
        self.rented -= 1
        self._shelf.setdefault((tuple(t.shape), t.dtype), []).append(t)


POOL = ScratchPool()


class FusedSwiGLU(Function):
    """silu(a) * b; the sigmoid is kept in scratch for the backward pass."""

    @staticmethod
    def forward(ctx, a, b):
        sig = POOL.rent_like(a)  # clean: saved on ctx, handed in by backward
        torch.sigmoid(a, out=sig)
        ctx.save_for_backward(a, b)
        ctx.sig = sig
        return a * sig * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        sig, ctx.sig = ctx.sig, None
        silu = a * sig
        da = grad * b * (sig + silu * (1 - sig))
        db = grad * silu
        POOL.hand_in(sig)
        return da, db


class FusedRMSNorm(Function):
    """Keeps 1/rms in scratch; frozen norms need neither gradient."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inv = POOL.rent(tuple(x.shape[:-1]) + (1,), x.dtype)  # leak: backward returns early for inputs without grad and never hands it in
        torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps, out=inv)
        ctx.save_for_backward(x, weight)
        ctx.inv = inv
        return x * inv * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dw = (grad * x * ctx.inv).flatten(0, -2).sum(0)
        if not ctx.needs_input_grad[0]:
            return None, dw, None
        gx = grad * weight
        inner = (gx * x).mean(-1, keepdim=True)
        dx = gx * ctx.inv - x * ctx.inv.pow(3) * inner
        POOL.hand_in(ctx.inv)
        ctx.inv = None
        return dx, dw, None


class DropoutAdd(Function):
    """residual + dropout(x); without dropout no mask is rented at all."""

    @staticmethod
    def forward(ctx, x, residual, p, training):
        ctx.mask = None
        ctx.scale = 1.0
        if not training or p == 0.0:
            return residual + x
        mask = POOL.rent_like(x)  # clean: near miss, backward hands it in and only skips when there is none
        mask.bernoulli_(1 - p)
        ctx.scale = 1.0 / (1 - p)
        ctx.mask = mask
        return residual + x * mask * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        if ctx.mask is None:
            return grad, grad, None, None
        dx = grad * ctx.mask * ctx.scale
        POOL.hand_in(ctx.mask)
        ctx.mask = None
        return dx, grad, None, None


class ChunkedCrossEntropy(Function):
    """Computes the logits gradient in forward, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, target, chunk):
        n = hidden.shape[0]
        grad_h = POOL.rent_like(hidden)  # clean: on ctx, handed in by backward
        logits = None
        loss = hidden.new_zeros(())
        for start in range(0, n, chunk):
            rows = slice(start, min(start + chunk, n))
            logits = POOL.rent((rows.stop - rows.start, weight.shape[0]), hidden.dtype)  # leak: rebound for every chunk, only the last is handed in
            torch.matmul(hidden[rows], weight.t(), out=logits)
            lse = logits.logsumexp(-1, keepdim=True)
            loss += (lse.squeeze(-1) - logits.gather(-1, target[rows, None]).squeeze(-1)).sum()
            probs = (logits - lse).exp_()
            probs.scatter_add_(-1, target[rows, None], -torch.ones_like(lse))
            grad_h[rows] = probs @ weight
        POOL.hand_in(logits)
        ctx.grad_h = grad_h
        ctx.n = n
        return loss / n

    @staticmethod
    def backward(ctx, grad):
        out = ctx.grad_h * (grad / ctx.n)
        POOL.hand_in(ctx.grad_h)
        ctx.grad_h = None
        return out, None, None, None


class TiledCrossEntropy(Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, chunk):
        n = hidden.shape[0]
        logits: Optional["torch.Tensor"] = None
        loss = hidden.new_zeros(())
        for start in range(0, n, chunk):
            rows = min(chunk, n - start)
            if logits is None or logits.shape[0] != rows:
                POOL.hand_in(logits)
                logits = POOL.rent((rows, weight.shape[0]), hidden.dtype)  # clean: near miss, the former tile is handed in before the rebinding
            torch.matmul(hidden[start : start + rows], weight.t(), out=logits)
            loss += logits.logsumexp(-1).sum() - logits.gather(-1, target[start : start + rows, None]).sum()
        POOL.hand_in(logits)
        ctx.save_for_backward(hidden, weight, target)
        return loss / n

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, target = ctx.saved_tensors
        probs = POOL.rent((hidden.shape[0], weight.shape[0]), hidden.dtype)  # clean: handed in on the frozen way and at the end
        torch.matmul(hidden, weight.t(), out=probs)
        if not ctx.needs_input_grad[0]:
            POOL.hand_in(probs)
            return None, None, None, None
        p = probs.softmax(-1)
        p.scatter_add_(-1, target[:, None], -torch.ones_like(target[:, None], dtype=p.dtype))
        dh = (p @ weight) * (grad / hidden.shape[0])
        POOL.hand_in(probs)
        return dh, None, None, None


class QuantizedLinear(Function):
    """Activations are quantised for the backward GEMM; evaluation needs no copy."""

    @staticmethod
    def forward(ctx, x, weight, keep):
        q = POOL.rent(tuple(x.shape), torch.int8)  # leak: keep=False leaves it off ctx and nobody hands it in
        scale = x.abs().amax().clamp_min(1e-8) / 127
        q.copy_((x / scale).round_())
        if keep:
            ctx.q = q
            ctx.scale = scale
            ctx.save_for_backward(weight)
        return (q.to(x.dtype) * scale) @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        dw = grad.flatten(0, -2).t() @ (ctx.q.to(grad.dtype) * ctx.scale).flatten(0, -2)
        POOL.hand_in(ctx.q)
        del ctx.q
        return grad @ weight, dw, None


class LoraDelta(Function):
    @staticmethod
    def forward(ctx, x, down, up, keep):
        mid = POOL.rent(tuple(x.shape[:-1]) + (down.shape[0],), x.dtype)  # clean: near miss, on ctx when kept, else handed in here
        torch.matmul(x, down.t(), out=mid)
        out = mid @ up.t()
        ctx.save_for_backward(x, down, up)
        ctx.mid = mid if keep else None
        if not keep:
            POOL.hand_in(mid)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, down, up = ctx.saved_tensors
        mid = ctx.mid
        owned = False
        if mid is None:
            mid = POOL.rent(tuple(x.shape[:-1]) + (down.shape[0],), x.dtype)  # clean: near miss, both origins are handed in at the end
            torch.matmul(x, down.t(), out=mid)
            owned = True
        dmid = grad @ up
        dup = grad.flatten(0, -2).t() @ mid.flatten(0, -2)
        if not owned:
            ctx.mid = None
        POOL.hand_in(mid)
        return dmid @ down, dmid.flatten(0, -2).t() @ x.flatten(0, -2), dup, None


def rope_cache(seq: int, dim: int, base: float, dtype: Any) -> "torch.Tensor":
    freqs = POOL.rent((seq, dim // 2), dtype)  # clean: returned to the caller
    for i in range(dim // 2):
        freqs[:, i] = torch.arange(seq) * math.pow(base, -2 * i / dim)
    return freqs


def apply_rope(x: "torch.Tensor", base: float = 10000.0) -> "torch.Tensor":
    freqs = rope_cache(x.shape[-2], x.shape[-1], base, x.dtype)  # leak: sin and cos are taken as copies and freqs is dropped
    cos, sin = freqs.cos(), freqs.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def apply_rope_inplace(x: "torch.Tensor", base: float = 10000.0) -> "torch.Tensor":
    freqs = rope_cache(x.shape[-2], x.shape[-1], base, x.dtype)  # clean: near miss, handed in after the copies
    cos, sin = freqs.cos(), freqs.sin()
    POOL.hand_in(freqs)
    a, b = x.chunk(2, -1)
    return x.copy_(torch.cat((a * cos - b * sin, a * sin + b * cos), -1))


class AlibiBias:
    """Bias tensors that live as long as their owner does."""

    def __init__(self, heads: int, seq: int, dtype: Any) -> None:
        self.bias = POOL.rent((heads, seq, seq), dtype)  # clean: near miss, the finalizer hands it in
        self._finalizer = weakref.finalize(self, POOL.hand_in, self.bias)

    def close(self) -> None:
        self._finalizer()
