"""Workspaces for ring attention: flat byte tensors shelved by size class."""
from __future__ import annotations

from collections import defaultdict
from typing import Sequence

import torch

_SHELF: dict[int, list[torch.Tensor]] = defaultdict(list)
_CAP_BYTES = 8 << 30
_live_bytes = 0


def _size_class(nbytes: int) -> int:
    return 1 << max(16, (nbytes - 1).bit_length())


def draw_ws(nbytes: int) -> torch.Tensor:
    """Take a workspace off the shelf, growing the shelf when the class is empty."""
    global _live_bytes
    cls = _size_class(nbytes)
    if _SHELF[cls]:
        return _SHELF[cls].pop()
    if _live_bytes + cls > _CAP_BYTES:
        raise MemoryError(f"workspace cap: {cls}")
    _live_bytes += cls
    return torch.empty(cls, dtype=torch.uint8, device="cuda")


def stow_ws(ws: torch.Tensor) -> None:
    _SHELF[ws.numel()].append(ws)


def swap_up(ws: torch.Tensor, need: int) -> torch.Tensor:
    """Trade ws for one of at least `need` bytes."""
    if ws.numel() >= need:
        return ws
    stow_ws(ws)
    return draw_ws(need)  # clean: near miss, old one stowed first, new one goes to caller


def _score_bytes(q: torch.Tensor, kv: torch.Tensor) -> int:
    return 4 * q.shape[0] * q.shape[1] * kv.shape[1]


def _block(q, kv, ws):
    s = ws.view(torch.float32)[: q.shape[0] * q.shape[1] * kv.shape[1]]
    s = s.view(q.shape[0], q.shape[1], kv.shape[1])
    torch.matmul(q.float(), kv[..., : q.shape[-1]].float().transpose(1, 2), out=s)
    return s.softmax(-1) @ kv[..., q.shape[-1]:].float()


def ring_forward(q: torch.Tensor, chunks: Sequence[torch.Tensor], rank: int, causal: bool):
    out = torch.zeros_like(q, dtype=torch.float32)
    for step, kv in enumerate(chunks):
        ws = draw_ws(_score_bytes(q, kv))  # leak: fully masked chunk continues without stowing
        if causal and step > rank:
            continue
        out += _block(q, kv, ws)
        stow_ws(ws)
    return out


def ring_forward_zigzag(q: torch.Tensor, chunks: Sequence[torch.Tensor], mask_for):
    out = torch.zeros_like(q, dtype=torch.float32)
    for step, kv in enumerate(chunks):
        ws = draw_ws(_score_bytes(q, kv))  # clean: near miss, finally runs on continue too
        try:
            mask = mask_for(step)
            if mask is None:
                continue
            out += _block(q, kv, ws) * mask
        finally:
            stow_ws(ws)
    return out


def varlen_forward(q_list, kv_list):
    outs = []
    ws = draw_ws(1 << 20)  # clean: near miss, swap_up stows it before the rebinding
    for q, kv in zip(q_list, kv_list):
        ws = swap_up(ws, _score_bytes(q, kv))  # clean: near miss, previous one was traded in
        outs.append(_block(q, kv, ws))
    stow_ws(ws)
    return torch.cat(outs)


def varlen_backward(grads, q_list, kv_list):
    ws = None
    pieces = []
    for g, q, kv in zip(grads, q_list, kv_list):
        need = _score_bytes(q, kv)
        if ws is None or ws.numel() < need:
            ws = draw_ws(need)  # leak: outgrown workspace is overwritten, never stowed
        pieces.append(_block(q, kv, ws) * g)
    if ws is not None:
        stow_ws(ws)
    return pieces


def rotary_scratch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x into a workspace; the caller stows it."""
    ws = draw_ws(x.numel() * x.element_size())  # clean: handed to the caller
    flat = ws.view(x.dtype)[: x.numel()].view_as(x)
    half = x.shape[-1] // 2
    flat[..., :half] = x[..., :half] * cos - x[..., half:] * sin
    flat[..., half:] = x[..., half:] * cos + x[..., :half] * sin
    return ws


def rotate_query(q, cos, sin):
    return rotary_scratch(q, cos, sin).view(q.dtype)[: q.numel()].clone().view_as(q)  # leak: clone kept, workspace dropped


def rotate_key(k, cos, sin):
    ws = rotary_scratch(k, cos, sin)  # clean: copied out, then stowed
    k.copy_(ws.view(k.dtype)[: k.numel()].view_as(k))
    stow_ws(ws)
    return k


def merge_lse(lses: Sequence[torch.Tensor]):
    if not lses:
        return None
    n = lses[0].numel()
    a = draw_ws(4 * n)  # clean: stowed on both returns
    top = a.view(torch.float32)[:n].view_as(lses[0])
    top.copy_(torch.stack(list(lses)).amax(0))
    if len(lses) == 1:
        res = top.clone()
        stow_ws(a)
        return res
    b = draw_ws(4 * n)  # leak: only a is stowed at the end, never b
    tot = b.view(torch.float32)[:n].view_as(top)
    tot.zero_()
    for lse in lses:
        tot += (lse - top).exp()
    res = top + tot.log()
    stow_ws(a)
    return res
