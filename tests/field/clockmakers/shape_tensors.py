"""Workspace tensors cached by shape, and the fused kernels of a block that use them."""
from __future__ import annotations

import math
from collections import Counter

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]


class Workspace:
    """draw()/stash() of tensors by (shape, dtype). Contents are undefined after draw()."""

    def __init__(self, device: str = "cuda"):
        self.device = device
        self._by_shape: dict[tuple[Shape, torch.dtype], list[torch.Tensor]] = {}
        self.draws: Counter = Counter()

    def draw(self, shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        key = (tuple(shape), dtype)
        self.draws[key] += 1
        stack = self._by_shape.setdefault(key, [])
        if not stack:
            return torch.empty(key[0], dtype=dtype, device=self.device)
        return stack.pop()  # clean: returned to the caller

    def draw_like(self, t: torch.Tensor) -> torch.Tensor:
        return self.draw(t.shape, t.dtype)  # clean: returned to the caller

    def draw_zeroed(self, shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        t = self.draw(shape, dtype)  # clean: zeroed and returned to the caller
        return t.zero_()

    def draw_at_least(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = 1 << max(0, math.ceil(math.log2(numel)))
        t = self.draw((size,), dtype)  # clean: returned to the caller
        return t

    def stash(self, t: torch.Tensor) -> None:
        self._by_shape.setdefault((tuple(t.shape), t.dtype), []).append(t)

    def stash_all(self, ts) -> None:
        for t in ts:
            self.stash(t)


# ---------------------------------------------------------------------------
# kernels that return a tensor of the workspace
# ---------------------------------------------------------------------------

def rms_scale(ws: Workspace, x: torch.Tensor, eps: float) -> torch.Tensor:
    out = ws.draw_like(x)  # clean: returned to the caller
    torch.mul(x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps), out=out)
    return out


def rotary_table(ws: Workspace, seq: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos = ws.draw((seq, dim))  # clean: returned in a tuple
    sin = ws.draw((seq, dim))  # clean: returned in a tuple
    freq = torch.outer(torch.arange(seq, device=cos.device), torch.arange(dim, device=cos.device) / dim)
    torch.cos(freq, out=cos)
    torch.sin(freq, out=sin)
    return cos, sin


def causal_bias(ws: Workspace, seq: int, window: int | None) -> torch.Tensor | None:
    if window is not None and window >= seq:
        return None
    bias = ws.draw_zeroed((seq, seq))  # clean: returned to the caller
    bias.masked_fill_(torch.ones_like(bias).triu(1).bool(), float("-inf"))
    return bias


# ---------------------------------------------------------------------------
# users
# ---------------------------------------------------------------------------

class Block:
    def __init__(self, ws: Workspace, w_qkv: torch.Tensor, w_out: torch.Tensor, eps: float = 1e-6):
        self.ws = ws
        self.w_qkv = w_qkv
        self.w_out = w_out
        self.eps = eps
        self.window: int | None = None
        self.saved: list[torch.Tensor] = []

    def pre_norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_scale(self.ws, x, self.eps).clone()  # leak: the workspace tensor is cloned and dropped

    def project(self, x: torch.Tensor) -> torch.Tensor:
        normed = rms_scale(self.ws, x, self.eps)  # clean: stashed after the projection
        y = F.linear(normed, self.w_qkv)
        self.ws.stash(normed)
        return y

    def apply_rotary(self, q: torch.Tensor, k: torch.Tensor) -> None:
        cos, sin = rotary_table(self.ws, q.shape[-2], q.shape[-1])  # leak: cos is stashed and sin is not
        q.mul_(cos).add_(q.roll(1, -1) * sin)
        k.mul_(cos).add_(k.roll(1, -1) * sin)
        self.ws.stash(cos)

    def apply_rotary_q(self, q: torch.Tensor) -> None:
        tables = rotary_table(self.ws, q.shape[-2], q.shape[-1])  # clean: near miss, stash_all takes the whole tuple
        q.mul_(tables[0]).add_(q.roll(1, -1) * tables[1])
        self.ws.stash_all(tables)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bias = causal_bias(self.ws, q.shape[-2], self.window)  # clean: near miss, None-checked and stashed when it exists
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        out = scores.softmax(-1) @ v
        if bias is not None:
            self.ws.stash(bias)
        return out

    def attend_chunked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int) -> torch.Tensor:
        acc = self.ws.draw_zeroed(q.shape, q.dtype)  # clean: copied out and stashed at the end
        for start in range(0, k.shape[-2], chunk):
            part = self.ws.draw(q.shape, q.dtype)  # leak: the early `break` leaves the loop with the part
            ks, vs = k[..., start : start + chunk, :], v[..., start : start + chunk, :]
            if ks.shape[-2] < chunk and not ks.any():
                break
            torch.matmul((q @ ks.transpose(-1, -2)).softmax(-1), vs, out=part)
            acc.add_(part)
            self.ws.stash(part)
        result = acc.clone()
        self.ws.stash(acc)
        return result

    def residual_chain(self, xs: list[torch.Tensor]) -> torch.Tensor:
        cur = self.ws.draw_like(xs[0])  # leak: cur is rebound to the next layer's tensor
        cur.copy_(xs[0])
        for x in xs[1:]:
            nxt = rms_scale(self.ws, x, self.eps)  # leak: rebinding cur loses the one of the layer before
            nxt.add_(cur)
            cur = nxt
        out = cur.clone()
        self.ws.stash(cur)
        return out

    def norm_chain(self, xs: list[torch.Tensor]) -> torch.Tensor:
        cur = self.ws.draw_like(xs[0])  # clean: near miss, stashed before cur is rebound
        cur.copy_(xs[0])
        for x in xs[1:]:
            nxt = rms_scale(self.ws, x, self.eps)  # clean: near miss, becomes cur, which is stashed on the next turn or at the end
            nxt.add_(cur)
            self.ws.stash(cur)
            cur = nxt
        out = cur.clone()
        self.ws.stash(cur)
        return out

    def save_input(self, x: torch.Tensor) -> None:
        t = self.ws.draw_like(x)  # clean: put in saved, which release_saved() stashes
        t.copy_(x)
        self.saved.append(t)

    def release_saved(self) -> None:
        self.ws.stash_all(self.saved)
        self.saved.clear()

    def quantile(self, x: torch.Tensor, q: float) -> float:
        flat = self.ws.draw_at_least(x.numel(), x.dtype)  # leak: deleted without being stashed
        flat = flat[: x.numel()]
        flat.copy_(x.reshape(-1))
        value = torch.quantile(flat, q).item()
        del flat
        return value
