"""Autograd wrapper around a tiled attention kernel with explicit workspaces."""
from typing import Any, List, Optional, Tuple

import torch
from torch.autograd import Function


class _WsPool:
    def __init__(self) -> None:
        self._items: List[torch.Tensor] = []
        self.num_lent = 0

    def acquire_ws(self, numel: int) -> torch.Tensor:
        self.num_lent += 1
        for i in range(len(self._items)):
            if self._items[i].numel() >= numel:
                return self._items.pop(i)
        return torch.empty(numel)

    def release_ws(self, ws: torch.Tensor) -> None:
        self.num_lent -= 1
        self._items.append(ws)


WS = _WsPool()


def _kernel_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ws: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    s = torch.matmul(q, k.transpose(-1, -2), out=ws[: q.shape[0] * k.shape[0]].view(q.shape[0], k.shape[0]))
    lse = s.logsumexp(-1)
    return torch.matmul((s - lse.unsqueeze(-1)).exp(), v), lse


class FlashAttn(Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ws = WS.acquire_ws(q.shape[0] * k.shape[0])  # clean: released before the return
        out, lse = _kernel_fwd(q, k, v, ws)
        ctx.save_for_backward(q, k, v, out, lse)
        WS.release_ws(ws)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        ws = WS.acquire_ws(q.shape[0] * k.shape[0])  # leak: no gradient for q means returning early with the workspace
        p = (torch.matmul(q, k.t()) - lse.unsqueeze(-1)).exp()
        dv = torch.matmul(p.t(), grad)
        if not ctx.needs_input_grad[0]:
            return None, None, dv
        dp = torch.matmul(grad, v.t(), out=ws[: q.shape[0] * k.shape[0]].view(q.shape[0], k.shape[0]))
        ds = p * (dp - (grad * out).sum(-1, keepdim=True))
        dq, dk = ds @ k, ds.t() @ q
        WS.release_ws(ws)
        return dq, dk, dv


class FlashAttnSaved(Function):
    """Keeps the probabilities between the passes."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.ws = WS.acquire_ws(q.shape[0] * k.shape[0])  # clean: backward releases what the context kept
        out, lse = _kernel_fwd(q, k, v, ctx.ws)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        s = ctx.ws[: q.shape[0] * k.shape[0]].view(q.shape[0], k.shape[0])
        p = (s - lse.unsqueeze(-1)).exp()
        dv = p.t() @ grad
        ds = p * (grad @ v.t() - (grad * out).sum(-1, keepdim=True))
        WS.release_ws(ctx.ws)
        ctx.ws = None
        return ds @ k, ds.t() @ q, dv


def varlen_forward(qs: List[torch.Tensor], ks: List[torch.Tensor], vs: List[torch.Tensor]) -> List[torch.Tensor]:
    ws: Optional[torch.Tensor] = None
    outs = []
    for q, k, v in zip(qs, ks, vs):
        need = q.shape[0] * k.shape[0]
        if ws is None or ws.numel() < need:
            ws = WS.acquire_ws(need)  # leak: a bigger workspace takes the name of the smaller one, which is not released
        outs.append(_kernel_fwd(q, k, v, ws)[0])
    if ws is not None:
        WS.release_ws(ws)
    return outs


def varlen_forward_grow(qs: List[torch.Tensor], ks: List[torch.Tensor], vs: List[torch.Tensor]) -> List[torch.Tensor]:
    ws: Optional[torch.Tensor] = None
    outs = []
    for q, k, v in zip(qs, ks, vs):
        need = q.shape[0] * k.shape[0]
        if ws is not None and ws.numel() < need:
            WS.release_ws(ws)
            ws = None
        if ws is None:
            ws = WS.acquire_ws(need)  # clean: near miss, the smaller one is released before the rebinding
        outs.append(_kernel_fwd(q, k, v, ws)[0])
    if ws is not None:
        WS.release_ws(ws)
    return outs


def _softmax_scratch(s: torch.Tensor, temp: float) -> torch.Tensor:
    ws = WS.acquire_ws(s.numel())  # clean: handed to the caller
    ws[: s.numel()].copy_(s.flatten())
    ws.div_(temp)
    return ws


def attention_entropy(s: torch.Tensor) -> float:
    p = _softmax_scratch(s, 1.0)  # clean: released after the sum
    h = -(p.softmax(0) * p.log_softmax(0)).sum().item()
    WS.release_ws(p)
    return h


def attention_peak(s: torch.Tensor, temps: List[float]) -> float:
    best = float("-inf")
    for t in temps:
        p = _softmax_scratch(s, t)  # leak: a zero temperature continues without the release
        if t == 0.0:
            continue
        best = max(best, float(p.softmax(0).max()))
        WS.release_ws(p)
    return best


def normalize_scores(s: torch.Tensor) -> torch.Tensor:
    p = _softmax_scratch(s, 1.0)  # leak: p is rebound to its own quotient
    p = p / p.sum()
    out = p.clone()
    WS.release_ws(p)
    return out


def normalize_scores_(s: torch.Tensor) -> torch.Tensor:
    p = _softmax_scratch(s, 1.0)  # clean: near miss, in place division then release
    p /= p.sum()
    out = p.clone()
    WS.release_ws(p)
    return out
