"""LongNet dilated attention with a bump-allocated, marker-based scratch arena."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class SegmentScratch:
    """Scratch space for one device, accounted in elements.

    Regions of equal size are chained in a bin and reused; `live` is the number of
    elements out at the moment and must be zero between steps.
    """

    def __init__(self, device, limit: int):
        self.device = device
        self.limit = limit
        self.live = 0
        self._bins: Dict[int, List[torch.Tensor]] = {}

    def reserve(self, *shape: int) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        self.live += n
        chain = self._bins.get(n)
        if chain:
            return chain.pop().view(shape)  # clean: returned in the requested shape
        return torch.empty(shape, device=self.device)

    def unreserve(self, t: torch.Tensor) -> None:
        self.live -= t.numel()
        self._bins.setdefault(t.numel(), []).append(t.view(-1))

    def fits(self, n: int) -> bool:
        return self.live + n <= self.limit


@dataclass
class Branch:
    segment: int
    rate: int


@dataclass
class BranchState:
    out: torch.Tensor
    lse: torch.Tensor

    def free(self, scratch: SegmentScratch) -> None:
        scratch.unreserve(self.out)
        scratch.unreserve(self.lse)


class DilatedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, branches: Sequence[Tuple[int, int]], scratch: SegmentScratch):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.branches = [Branch(s, r) for s, r in branches]
        self.scratch = scratch
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self._kept: List[BranchState] = []
        self._bias: Optional[torch.Tensor] = None

    def _sparsify(self, t: torch.Tensor, br: Branch, offset: int) -> torch.Tensor:
        """(b, n, h, d) -> (b * segments, m, h, d), a scratch region of the caller's."""
        b, n, h, d = t.shape
        segs, m = n // br.segment, br.segment // br.rate
        region = self.scratch.reserve(b * segs, m, h, d)  # clean: returned
        region.copy_(t.reshape(b * segs, br.segment, h, d)[:, offset :: br.rate][:, :m])
        return region

    def _branch(self, q, k, v, br: Branch, offset: int) -> BranchState:
        sq = self._sparsify(q, br, offset)  # clean: freed with k and v below
        sk = self._sparsify(k, br, offset)  # clean: freed below
        sv = self._sparsify(v, br, offset)  # clean: freed below
        scores = torch.einsum("bqhd,bkhd->bhqk", sq, sk) * self.head_dim ** -0.5
        lse = self.scratch.reserve(*scores.shape[:3])  # clean: moves into the BranchState
        torch.logsumexp(scores, dim=-1, out=lse)
        out = self.scratch.reserve(*sv.shape)  # clean: moves into the BranchState
        out.copy_(torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, dim=-1), sv))
        for t in (sq, sk, sv):
            self.scratch.unreserve(t)
        return BranchState(out, lse)

    def _project(self, x: torch.Tensor):
        b, n, _ = x.shape
        return self.in_proj(x).view(b, n, 3, self.heads, self.head_dim).unbind(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self._project(x)
        acc = torch.zeros_like(q)
        for i, br in enumerate(self.branches):
            if n % br.segment:
                continue
            offset = i % br.rate
            st = self._branch(q, k, v, br, offset)  # clean: near miss, the continue precedes it, freed at the end of the round
            view = acc.view(b * (n // br.segment), br.segment, self.heads, self.head_dim)
            view[:, offset :: br.rate] += st.out
            st.free(self.scratch)
        return self.out_proj(acc.view(b, n, c))

    def forward_keep(self, x: torch.Tensor) -> List[torch.Tensor]:
        """Branch outputs of one pass, valid until forget()."""
        q, k, v = self._project(x)
        self.forget()
        for br in self.branches:
            self._kept.append(self._branch(q, k, v, br, 0))  # clean: near miss, forget() frees every kept state
        return [st.out for st in self._kept]

    def forget(self) -> None:
        while self._kept:
            self._kept.pop().free(self.scratch)

    def branch_weights(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._project(x)
        means = []
        for br in self.branches:
            st = self._branch(q, k, v, br, 0)  # leak: only lse is unreserved, out stays reserved
            means.append(st.lse.mean())
            self.scratch.unreserve(st.lse)
        return torch.softmax(torch.stack(means), 0)

    def densest(self, x: torch.Tensor, floor: float) -> Optional[int]:
        """Index of the first branch whose mean log-sum-exp exceeds `floor`."""
        q, k, v = self._project(x)
        for i, br in enumerate(self.branches):
            st = self._branch(q, k, v, br, 0)  # leak: the branch that is found returns before free
            if st.lse.mean().item() > floor:
                return i
            st.free(self.scratch)
        return None

    def set_bias(self, bias: torch.Tensor) -> None:
        if self._bias is not None:
            self.scratch.unreserve(self._bias)
        self._bias = self.scratch.reserve(*bias.shape)  # clean: near miss, the old bias went back first, clear_bias() returns it
        self._bias.copy_(bias)

    def scale_bias(self, factor: float) -> None:
        if self._bias is None:
            return
        scaled = self.scratch.reserve(*self._bias.shape)  # leak: the old bias is overwritten in the field
        torch.mul(self._bias, factor, out=scaled)
        self._bias = scaled

    def clear_bias(self) -> None:
        if self._bias is not None:
            self.scratch.unreserve(self._bias)
            self._bias = None


def segment_means(scratch: SegmentScratch, x: torch.Tensor, segment: int) -> torch.Tensor:
    b, n, c = x.shape
    tmp = scratch.reserve(b, n // segment, segment, c)  # leak: the mean is a fresh tensor, tmp is dropped
    tmp.copy_(x[:, : n // segment * segment].reshape(tmp.shape))
    return tmp.mean(2)


def reorder(scratch: SegmentScratch, x: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    if not scratch.fits(x.numel()):
        return x[:, perm]
    tmp = scratch.reserve(*x.shape)  # clean: near miss, the other return reserved nothing
    torch.index_select(x, 1, perm, out=tmp)
    x.copy_(tmp)
    scratch.unreserve(tmp)
    return x
