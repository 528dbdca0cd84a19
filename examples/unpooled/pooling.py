"""Summaries of segments, summed up in buffers that nobody sees."""

import torch
from torch import nn


class SegmentSummary(nn.Module):
    """The mean of each segment, sums in place, gradients through them."""

    def __init__(self, dim, segment=16):
        super(SegmentSummary, self).__init__()
        self.segment = segment
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, weights=None):
        b, n, d = x.shape
        count = -(-n // self.segment)
        padded = x.new_zeros(b, count * self.segment, d)
        padded[:, :n] = x
        sums = padded.view(b, count, self.segment, d).sum(2)
        if weights is not None:
            total = x.new_zeros((b, count, d))
            for weight in weights:
                total += weight * sums
            sums = total / len(weights)
        return self.proj(sums / self.segment)


class Gate(nn.Module):
    """Has no `__init__` of its own, and a mask in one expression."""

    def forward(self, scores):
        n = scores.size(-1)
        return scores + torch.ones(n, n, dtype=scores.dtype, device=scores.device).tril(-1)


class SummaryBlock(nn.Sequential):
    """A base that takes what it likes."""

    def forward(self, x):
        b, n, d = x.shape
        held = torch.zeros(b, n, d, dtype=x.dtype)
        held.add_(x, alpha=2)
        return super().forward(held - x)
