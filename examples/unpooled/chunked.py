"""Attention for inference, a block of queries at a time, over one buffer of scores."""

import math

import torch
from torch import nn


class ChunkedAttention(nn.Module):
    """Causal attention without gradients; scores never exceed `block` rows.

    Args:
        dim: width of the model
        heads: number of heads
        block: queries that are looked at together
    """

    def __init__(self, dim, heads, block=64):
        super().__init__()
        self.heads = heads
        self.block = block
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    @torch.no_grad()
    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = torch.empty(b, self.heads, n, d // self.heads, dtype=x.dtype, device=x.device)
        scores = torch.empty((b, self.heads, self.block, n), dtype=x.dtype, device=x.device)  # one for all

        for start in range(0, n, self.block):
            stop = min(start + self.block, n)
            part = scores[:, :, : stop - start]
            torch.matmul(q[:, :, start:stop], k.transpose(-1, -2), out=part)
            part.div_(math.sqrt(d // self.heads))
            rows = torch.arange(start, stop, device=x.device)
            part.masked_fill_(rows[:, None] < torch.arange(n, device=x.device), float("-inf"))
            # the softmax makes a tensor of its own
            mixed[:, :, start:stop] = torch.matmul(part.softmax(-1), v)
        gathered = mixed.transpose(1, 2).reshape(b, n, d).clone()
        return self.out(gathered)
