"""Attention with all heads of a part of the heads dimension on each rank."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .comm import exchange_bias, heads_to_seq, seq_to_heads
from .workspace import ScopedWorkspace


class UlyssesAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ws: ScopedWorkspace, group=None, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.ws = ws
        self.group = group
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        s = x.shape[0]
        q, k, v = (t.view(s, self.heads, -1) for t in self.qkv(x).chunk(3, -1))
        held = []
        try:
            for t in (q, k, v):
                held.append(seq_to_heads(self.ws, t.contiguous(), self.group))  # clean: near miss, held is handed in by the finally
            qh, kh, vh = (t.flatten(0, 1).transpose(0, 1)[None] for t in held)
            b = exchange_bias(self.ws, bias, self.group)
            y = F.scaled_dot_product_attention(qh, kh, vh, attn_mask=b, is_causal=self.causal and b is None)
            y = y[0].transpose(0, 1).reshape(held[0].shape).contiguous()
        finally:
            for t in held:
                self.ws.hand_in(t)
        return self.o(heads_to_seq(self.ws, y, self.group).flatten(1))

    def linear_scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
        """Kernel attention's normaliser; None when the workspace is full."""
        phi_q = self.ws.rent(tuple(q.shape), q.dtype)  # leak: not handed in when phi_k cannot be rented
        if phi_q is None:
            return None
        phi_k = self.ws.rent(tuple(k.shape), k.dtype)  # clean: handed in before the return
        if phi_k is None:
            return None
        torch.add(F.elu(q), 1, out=phi_q)
        torch.add(F.elu(k), 1, out=phi_k)
        z = phi_q @ phi_k.sum(0, keepdim=True).transpose(-1, -2)
        self.ws.hand_in(phi_k)
        self.ws.hand_in(phi_q)
        return z
