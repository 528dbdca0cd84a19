"""Long-context attention in chunks, with workspaces cached by shape.

Scores, statistics and partial outputs come out of `Workspace`; the q/k/v tensors
and the result are ordinary tensors of the caller.
"""
from __future__ import annotations

import math
from typing import Dict, List, Optional, Tuple

import torch

ShapeKey = Tuple[Tuple[int, ...], torch.dtype]


class Workspace:
    def __init__(self, device: torch.device, limit: int = 1 << 32) -> None:
        self.device = device
        self.limit = limit
        self._cache: Dict[ShapeKey, List[torch.Tensor]] = {}
        self._bytes = 0

    def get(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        bin_ = self._cache.get((shape, dtype))
        if bin_:
            return bin_.pop()  # clean: handed to the caller
        t = torch.empty(shape, dtype=dtype, device=self.device)
        self._bytes += t.numel() * t.element_size()
        return t

    def get_filled(self, value: float, *shape: int) -> torch.Tensor:
        t = self.get(*shape)  # clean: handed to the caller
        return t.fill_(value)

    def get_padded(self, n: int, multiple: int, dim: int) -> torch.Tensor:
        """A tensor with at least n rows; reuses a bigger one if there is one."""
        want = -(-n // multiple) * multiple
        for (shape, dtype), bin_ in self._cache.items():
            if len(shape) != 2 or shape[1] != dim or shape[0] < want or not bin_:
                continue
            t = bin_.pop()  # leak: one of another dtype than float32 is popped and passed over
            if dtype == torch.float32:
                return t
        return self.get(want, dim)  # clean: handed to the caller

    def put(self, *ts: torch.Tensor) -> None:
        for t in ts:
            self._cache.setdefault((tuple(t.shape), t.dtype), []).append(t)

    def trim(self) -> None:
        for bin_ in self._cache.values():
            while len(bin_) > 1:
                t = bin_.pop()  # clean: dropped on purpose with its bytes taken off the account
                self._bytes -= t.numel() * t.element_size()


def scores(ws: Workspace, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Pooled; the caller puts it back."""
    s = ws.get(q.shape[0], k.shape[0])  # clean: handed to the caller
    torch.mm(q.float(), k.float().t(), out=s)
    return s.mul_(scale)


def causal(ws: Workspace, s: torch.Tensor, q0: int, k0: int) -> torch.Tensor:
    """Masks in place and returns s."""
    if k0 + s.shape[1] <= q0:
        return s
    mask = ws.get(s.shape[0], s.shape[1], dtype=torch.bool)  # clean: put back before the return
    qi = torch.arange(q0, q0 + s.shape[0], device=s.device)[:, None]
    ki = torch.arange(k0, k0 + s.shape[1], device=s.device)[None, :]
    torch.gt(ki, qi, out=mask)
    s.masked_fill_(mask, -math.inf)
    ws.put(mask)
    return s


class ChunkedAttention:
    def __init__(self, ws: Workspace, chunk: int, is_causal: bool = True, alibi: Optional[float] = None) -> None:
        self.ws = ws
        self.chunk = chunk
        self.is_causal = is_causal
        self.alibi = alibi
        self._bias: Optional[torch.Tensor] = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n, d = q.shape
        out = torch.empty_like(q)
        scale = 1.0 / math.sqrt(d)
        for q0 in range(0, n, self.chunk):
            qc = q[q0 : q0 + self.chunk]
            acc = self.ws.get_filled(0.0, qc.shape[0], d)  # clean: put back at the end of each query chunk
            m = self.ws.get_filled(-math.inf, qc.shape[0], 1)  # clean: near miss, swapped with new_m each round, and whichever is m at the end is put back
            l = self.ws.get_filled(0.0, qc.shape[0], 1)  # clean: put back at the end of each query chunk
            for k0 in range(0, k.shape[0], self.chunk):
                if self.is_causal and k0 > q0 + qc.shape[0] - 1:
                    break
                kc, vc = k[k0 : k0 + self.chunk], v[k0 : k0 + self.chunk]
                s = scores(self.ws, qc, kc, scale)  # clean: near miss, causal() returns the same tensor and it is put back
                if self.is_causal:
                    s = causal(self.ws, s, q0, k0)
                new_m = self.ws.get(qc.shape[0], 1)  # clean: near miss, becomes m, and the former m is put back
                torch.maximum(m, s.amax(1, keepdim=True), out=new_m)
                s.sub_(new_m).exp_()
                corr = (m - new_m).exp_()
                l.mul_(corr).add_(s.sum(1, keepdim=True))
                acc.mul_(corr).addmm_(s, vc.float())
                self.ws.put(m, s)
                m = new_m
            out[q0 : q0 + self.chunk] = (acc / l).to(q.dtype)
            self.ws.put(acc, m, l)
        return out

    def forward_windowed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        out = torch.zeros_like(q)
        scale = 1.0 / math.sqrt(q.shape[1])
        for q0 in range(0, q.shape[0], self.chunk):
            qc = q[q0 : q0 + self.chunk]
            lo = max(0, q0 - window)
            s = scores(self.ws, qc, k[lo : q0 + qc.shape[0]], scale)  # leak: a fully masked chunk continues without a put
            s = causal(self.ws, s, q0, lo)
            if torch.isinf(s).all():
                continue
            p = s.softmax(-1)
            out[q0 : q0 + qc.shape[0]] = (p @ v[lo : q0 + qc.shape[0]].float()).to(q.dtype)
            self.ws.put(s)
        return out

    def entropy(self, q: torch.Tensor, k: torch.Tensor) -> float:
        p = scores(self.ws, q, k, 1.0 / math.sqrt(q.shape[1]))  # leak: rebound to a softmax of it, which is what is put back
        p = p.softmax(-1)
        h = -(p * p.clamp_min(1e-9).log()).sum(-1).mean()
        self.ws.put(p)
        return float(h)

    def max_logit(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return scores(self.ws, q, k, 1.0).amax().clone()  # leak: the pooled scores are a temporary

    def bias(self, n: int) -> Optional[torch.Tensor]:
        if self.alibi is None:
            return None
        if self._bias is None or self._bias.shape[0] < n:
            fresh = self.ws.get(n, n)  # leak: a longer sequence replaces the held bias, which is not put back
            i = torch.arange(n, device=fresh.device, dtype=torch.float32)
            torch.sub(i[None, :], i[:, None], out=fresh)
            self._bias = fresh.mul_(self.alibi)
        return self._bias[:n, :n]

    def close(self) -> None:
        if self._bias is not None:
            self.ws.put(self._bias)
            self._bias = None

    def with_dropout(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        use = training and p > 0
        s = scores(self.ws, q, k, 1.0 / math.sqrt(q.shape[1]))  # clean: put back at the end
        keep = None
        if use:
            keep = self.ws.get(*s.shape)  # clean: near miss, put back under the same flag
            keep.bernoulli_(1 - p).div_(1 - p)
        w = s.softmax(-1)
        if use:
            w.mul_(keep)
        out = (w @ v.float()).to(q.dtype)
        if use:
            self.ws.put(keep)
        self.ws.put(s)
        return out


def merge_partials(ws: Workspace, outs: List[torch.Tensor], lses: List[torch.Tensor]) -> torch.Tensor:
    """Combines partial outputs of context-parallel ranks."""
    stack = ws.get(len(lses), lses[0].shape[0])  # clean: put back at the end
    for i, l in enumerate(lses):
        stack[i].copy_(l)
    tot = torch.logsumexp(stack, 0)
    acc = ws.get_filled(0.0, *outs[0].shape)  # leak: put back only through a conversion that may make another tensor
    for o, l in zip(outs, lses):
        acc.add_(o.float() * (l - tot).exp()[:, None])
    ws.put(stack)
    acc = acc.to(outs[0].dtype)
    res = acc.clone()
    ws.put(acc)
    return res
