"""Attention with a positional bias that is built anew for each length."""

import torch
import torch.nn.functional as F
from torch import nn


class SlopedBias(nn.Module):
    """Adds to the scores what grows with distance, a slope a head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.logspace(0, -1, heads))

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        b, h, n, m = scores.shape
        bias = torch.zeros((h, n, m), dtype=scores.dtype, device=scores.device)
        distance = torch.arange(m, device=scores.device) - torch.arange(n, device=scores.device)[:, None]
        for head in range(h):
            bias[head] += self.slopes[head].item() * distance
        return scores + bias


class BiasedAttention(nn.Module):
    """Attention that learns, with a sloped bias and a causal mask."""

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        *,
        dropout: float = 0.0,  # on the attention weights
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.bias = SlopedBias(heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (each.view(b, n, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        scores = self.bias(q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5)
        mask = torch.full((n, n), float("-inf"), dtype=x.dtype, device=x.device)
        mask.triu_(1)
        scores = scores + mask
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))
