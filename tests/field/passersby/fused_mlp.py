# Fused MLP kernels (reference implementation) with a module-level workspace.
import os
import threading

import torch
import torch.nn.functional as F

_WS_LOCK = threading.Lock()
_WS_FREE = {}      # (numel, dtype) -> list of tensors
_WS_COUNT = 0
_WS_MAX = int(os.environ.get("MLP_WS_MAX", "256"))


def get_workspace(numel, dtype=torch.float32):
    global _WS_COUNT
    with _WS_LOCK:  # clean: with statement
        lst = _WS_FREE.setdefault((numel, dtype), [])
        if lst:
            return lst.pop()  # clean: handed to the caller
        if _WS_COUNT >= _WS_MAX:
            raise MemoryError("workspace limit")
        _WS_COUNT += 1
    return torch.empty(numel, dtype=dtype)


def free_workspace(ws):
    with _WS_LOCK:  # clean: with statement
        _WS_FREE.setdefault((ws.numel(), ws.dtype), []).append(ws)


def workspace_for(x, cols):
    """2-d workspace with as many rows as x"""
    return get_workspace(x.shape[0] * cols, x.dtype).view(x.shape[0], cols)  # clean: the view is what the caller gets and frees


def release_2d(ws):
    free_workspace(ws.view(-1))


def gate_up(x, w_gate, w_up):
    g = workspace_for(x, w_gate.shape[1])  # clean: freed after the product
    u = workspace_for(x, w_up.shape[1])  # clean: freed after the product
    torch.mm(x, w_gate, out=g)
    torch.mm(x, w_up, out=u)
    F.silu(g, inplace=True)
    h = g * u
    release_2d(u)
    release_2d(g)
    return h


def gate_up_inplace(x, w_gate, w_up):
    """Returns a workspace; to be released by the caller with release_2d."""
    g = workspace_for(x, w_gate.shape[1])  # clean: near miss, multiplied in place and returned
    u = workspace_for(x, w_up.shape[1])  # clean: freed
    torch.mm(x, w_gate, out=g)
    torch.mm(x, w_up, out=u)
    F.silu(g, inplace=True)
    g.mul_(u)
    release_2d(u)
    return g


def gate_up_fast(x, w_gate, w_up):
    """Like gate_up_inplace."""
    g = workspace_for(x, w_gate.shape[1])  # leak: the product rebinds g, the workspace goes nowhere
    u = workspace_for(x, w_up.shape[1])  # clean: freed
    torch.mm(x, w_gate, out=g)
    torch.mm(x, w_up, out=u)
    g = F.silu(g) * u
    release_2d(u)
    return g


def mlp(x, w_gate, w_up, w_down):
    h = gate_up_inplace(x, w_gate, w_up)  # clean: freed after the projection
    y = h @ w_down
    release_2d(h)
    return y


def mlp_residual(x, w_gate, w_up, w_down):
    return x + gate_up_inplace(x, w_gate, w_up) @ w_down  # leak: the returned workspace is used in the expression and dropped


def mlp_chunked(x, w_gate, w_up, w_down, rows=1024):
    out = torch.empty(x.shape[0], w_down.shape[1], dtype=x.dtype)
    for i in range(0, x.shape[0], rows):
        part = x[i:i + rows]
        h = gate_up_inplace(part, w_gate, w_up)  # clean: freed in every round
        torch.mm(h, w_down, out=out[i:i + rows])
        release_2d(h)
    return out


def mlp_sparse(x, w_gate, w_up, w_down, mask):
    out = torch.zeros(x.shape[0], w_down.shape[1], dtype=x.dtype)
    for r in range(x.shape[0]):
        h = gate_up_inplace(x[r:r + 1], w_gate, w_up)  # leak: masked rows continue without freeing
        if not mask[r]:
            continue
        out[r] = (h @ w_down)[0]
        release_2d(h)
    return out


def layer_norm(x, weight, bias, eps=1e-5):
    ws = get_workspace(x.numel(), x.dtype)  # clean: near miss, xc is a view of it
    xc = ws.view_as(x)
    torch.sub(x, x.mean(-1, keepdim=True), out=xc)
    var = xc.pow(2).mean(-1, keepdim=True)
    xc.mul_(torch.rsqrt(var + eps))
    y = xc * weight + bias
    free_workspace(ws)
    return y


def rms_norm(x, weight, eps=1e-6):
    ws = get_workspace(x.numel(), x.dtype)  # leak: half precision takes the other way out
    sq = ws.view_as(x)
    if x.dtype in (torch.float16, torch.bfloat16):
        xf = x.float()
        return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    torch.mul(x, x, out=sq)
    y = x * torch.rsqrt(sq.mean(-1, keepdim=True) + eps) * weight
    free_workspace(ws)
    return y


def quantize_rows(x, bits=8):
    q = workspace_for(x, x.shape[1])  # leak: an unsupported width raises after the workspace was taken
    if bits not in (4, 8):
        raise ValueError("unsupported number of bits: %d" % bits)
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    torch.div(x, scale, out=q)
    res = q.round_().to(torch.int8)
    release_2d(q)
    return res, scale


def quantize_cols(x, bits=8):
    if bits not in (4, 8):
        raise ValueError("unsupported number of bits: %d" % bits)
    q = workspace_for(x, x.shape[1])  # clean: near miss, the check comes first
    scale = x.abs().amax(0, keepdim=True) / (2 ** (bits - 1) - 1)
    torch.div(x, scale, out=q)
    res = q.round_().to(torch.int8)
    release_2d(q)
    return res, scale
