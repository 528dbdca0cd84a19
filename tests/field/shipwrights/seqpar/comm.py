"""Exchanges between heads and sequence; results are workspace tensors."""
from __future__ import annotations

import torch
import torch.distributed as dist

from .workspace import ScopedWorkspace


def seq_to_heads(ws: ScopedWorkspace, t: torch.Tensor, group) -> torch.Tensor:
    """(s, h, d) local sequence -> (s * p, h / p, d); the caller hands it in."""
    p = dist.get_world_size(group)
    s, h, d = t.shape
    packed = ws.rent_zero((p, s, h // p, d), t.dtype)  # clean: handed in by the finally
    try:
        packed.copy_(t.view(s, p, h // p, d).transpose(0, 1))
        out = ws.rent_zero((p, s, h // p, d), t.dtype)  # clean: handed to the caller
        dist.all_to_all_single(out, packed, group=group)
        return out
    finally:
        ws.hand_in(packed)


def heads_to_seq(ws: ScopedWorkspace, t: torch.Tensor, group) -> torch.Tensor:
    """The way back; a plain tensor."""
    recv = ws.rent_zero(tuple(t.shape), t.dtype)  # clean: handed in after the copy
    dist.all_to_all_single(recv, t, group=group)
    p, s, h, d = recv.shape
    out = recv.permute(1, 0, 2, 3).reshape(s, p * h, d).clone()
    ws.hand_in(recv)
    return out


def exchange_bias(ws: ScopedWorkspace, bias: torch.Tensor | None, group) -> torch.Tensor | None:
    if bias is None:
        return None
    return seq_to_heads(ws, bias, group).sum(-1)  # leak: the sum is new and the exchanged tensor is not handed in
