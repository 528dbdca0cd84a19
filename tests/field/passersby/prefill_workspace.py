"""Chunked prefill with paged attention; scratch comes from a tiered allocator."""
from __future__ import annotations

import logging
from typing import ClassVar, Dict, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class ScratchPool:
    """LIFO per size class."""

    SIZES: ClassVar[Tuple[int, ...]] = (1 << 12, 1 << 16, 1 << 20, 1 << 24)

    def __init__(self, per_class: int, device: Union[str, torch.device] = "cpu") -> None:
        self._stacks: Dict[int, List[Tensor]] = {
            s: [torch.empty(s, device=device) for _ in range(per_class)] for s in self.SIZES
        }

    def checkout_scratch(self, numel: int) -> Tensor:
        for size in self.SIZES:
            if size >= numel and self._stacks[size]:
                return self._stacks[size].pop()  # clean: handed to the caller
        raise RuntimeError(f"no scratch for {numel} elements")

    def checkin_scratch(self, t: Tensor) -> None:
        self._stacks[t.numel()].append(t)


class TracingPool(ScratchPool):
    """Same pool, logs what happens."""

    def checkout_scratch(self, numel: int) -> Tensor:
        t = super().checkout_scratch(numel)  # clean: handed on
        logger.debug("out %d (%d)", t.numel(), numel)
        return t


class ScratchMixin:
    pool: Optional[ScratchPool]

    def _scratch(self, numel: int) -> Tensor:
        if self.pool is None:
            return torch.empty(numel)
        return self.pool.checkout_scratch(numel)  # clean: handed to the caller

    def _unscratch(self, t: Tensor) -> None:
        if self.pool is not None:
            self.pool.checkin_scratch(t)


class PrefillAttention(ScratchMixin, nn.Module):
    def __init__(self, heads: int, dim: int, pool: Optional[ScratchPool] = None, chunk: int = 512) -> None:
        super().__init__()
        self.heads, self.dim, self.chunk = heads, dim, chunk
        self.pool = pool
        self.carry: Optional[Tensor] = None
        self.carry_rows = 0

    def _chunk_scores(self, q: Tensor, k: Tensor) -> Tensor:
        s = self._scratch(q.shape[0] * k.shape[0])  # clean: near miss, the caller frees it, with and without a pool
        torch.mm(q, k.t(), out=s[: q.shape[0] * k.shape[0]].view(q.shape[0], k.shape[0]))
        return s

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for i in range(0, q.shape[0], self.chunk):
            qc = q[i : i + self.chunk]
            s = self._chunk_scores(qc, k)  # clean: freed in each round
            grid = s[: qc.shape[0] * k.shape[0]].view(qc.shape[0], -1)
            outs.append(torch.softmax(grid, -1) @ v)
            self._unscratch(s)
        return torch.cat(outs)

    def forward_windowed(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        outs = []
        for i in range(0, q.shape[0], self.chunk):
            qc, kc, vc = q[i : i + self.chunk], k[max(0, i - window) : i + self.chunk], v[max(0, i - window) : i + self.chunk]
            s = self._chunk_scores(qc, kc)  # leak: s becomes the softmax result, the scratch is never checked in
            s = torch.softmax(s[: qc.shape[0] * kc.shape[0]].view(qc.shape[0], -1), -1)
            outs.append(s @ vc)
        return torch.cat(outs)

    def max_score(self, q: Tensor, k: Tensor) -> float:
        return float(self._chunk_scores(q, k)[: q.shape[0] * k.shape[0]].max())  # leak: nobody keeps the scratch that the helper returned

    def begin_carry(self, rows: int) -> None:
        self.end_carry()
        self.carry = self._scratch(rows * self.dim)  # clean: near miss, end_carry freed the one before
        self.carry_rows = rows

    def resize_carry(self, rows: int) -> None:
        if rows <= self.carry_rows:
            return
        bigger = self._scratch(rows * self.dim)  # clean: near miss, takes the field after the old one is freed
        if self.carry is not None:
            n = self.carry_rows * self.dim
            bigger[:n].copy_(self.carry[:n])
            self._unscratch(self.carry)
        self.carry, self.carry_rows = bigger, rows

    def reset_carry(self, rows: int) -> None:
        self.carry = self._scratch(rows * self.dim)  # leak: the carry of the chunk before is overwritten while checked out
        self.carry_rows = rows
        self.carry.zero_()

    def end_carry(self) -> None:
        if self.carry is not None:
            self._unscratch(self.carry)
            self.carry = None
            self.carry_rows = 0

    def rope(self, x: Tensor, pos: Tensor, inv: Tensor) -> Tensor:
        cs = self._scratch(pos.numel() * inv.numel())  # clean: freed at the only exit
        angles = cs[: pos.numel() * inv.numel()].view(pos.numel(), inv.numel())
        torch.outer(pos.float(), inv, out=angles)
        c, s = angles.cos(), angles.sin()
        self._unscratch(cs)
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * c - x2 * s, x1 * s + x2 * c], -1)

    def compress(self, k: Tensor, ratio: int) -> Optional[Tensor]:
        a = self._scratch(k.numel())  # leak: rows that do not divide return None, only b has been freed
        b = self._scratch(k.numel())  # clean: near miss, freed in front of both exits
        a[: k.numel()].copy_(k.flatten())
        if k.shape[0] % ratio:
            self._unscratch(b)
            return None
        b[: k.numel()].copy_(a[: k.numel()])
        out = b[: k.numel()].view(-1, ratio, k.shape[1]).mean(1)
        self._unscratch(a)
        self._unscratch(b)
        return out

    def topk_pages(self, q: Tensor, means: Tensor, n: int) -> List[int]:
        s = self._chunk_scores(q, means)  # leak: fewer pages than n returns the whole range with the scratch out
        if means.shape[0] <= n:
            return list(range(means.shape[0]))
        ids = s[: q.shape[0] * means.shape[0]].view(q.shape[0], -1).sum(0).topk(n).indices.tolist()
        self._unscratch(s)
        return ids
