from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pool import Scoped, SharedPool


class SegmentAttention(nn.Module):
    def __init__(self, pool: SharedPool, heads: int, dim: int, seg: int, rate: int):
        super().__init__()
        self.pool = pool
        self.heads, self.dim, self.seg, self.rate = heads, dim, seg, rate
        self._keys: Optional[Tensor] = None
        self._mask: Optional[Tensor] = None

    def _mask_for(self, n: int) -> Tensor:
        if self._mask is None or self._mask.shape[0] != n:
            self._mask = self.pool.rent_zeroed(n, n)  # leak: another length replaces the mask that is still rented
            self._mask.masked_fill_(torch.ones(n, n, device=self._mask.device).triu(1).bool(), float("-inf"))
        return self._mask

    def remember(self, k: Tensor) -> None:
        if self._keys is not None:
            self.pool.hand_in(self._keys)
        self._keys = self.pool.rent(*k.shape, dtype=k.dtype)  # clean: near miss, the former keys are handed in first and free() hands in these
        self._keys.copy_(k)

    def free(self) -> None:
        for name in ("_keys", "_mask"):
            t = getattr(self, name)
            if t is not None:
                self.pool.hand_in(t)
                setattr(self, name, None)

    def _gather(self, x: Tensor, offset: int) -> Tensor:
        picked = x[:, :, offset :: self.rate]
        out = self.pool.rent(*picked.shape, dtype=picked.dtype)  # clean: returned to the caller
        out.copy_(picked)
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for offset in range(self.rate):
            qs = self._gather(q, offset)  # clean: handed in at the end of each turn
            ks = self._gather(k, offset)  # clean: handed in at the end of each turn
            vs = self._gather(v, offset).contiguous()  # clean: near miss, contiguous() returns the rented tensor itself as it is contiguous
            out[:, :, offset :: self.rate] = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=self._mask_for(qs.shape[2]))
            for t in (qs, ks, vs):
                self.pool.hand_in(t)
        return out

    def pooled_summary(self, x: Tensor) -> Tensor:
        picked = self._gather(x, 0)  # leak: the mean is returned and the gathered tensor is dropped
        return picked.float().mean(dim=2)

    def local_scores(self, q: Tensor, k: Tensor) -> Tensor:
        with Scoped(self.pool) as scope:
            s = scope.rent(q.shape[2], k.shape[2], dtype=q.dtype)  # clean: near miss, never handed in by name but by the scope
            torch.mm(q[0, 0], k[0, 0].T, out=s)
            return s.softmax(-1)
