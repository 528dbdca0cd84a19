"""Attention over sequence shards."""
from __future__ import annotations

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F

from .tensors import ExchangeTensors
from .transport import Exchange


class UlyssesAttention(torch.nn.Module):
    def __init__(self, exchange: Exchange, tensors: ExchangeTensors, dropout: float = 0.0):
        super().__init__()
        self.exchange = exchange
        self.tensors = tensors
        self.dropout = dropout
        self.cached_kv: Optional[torch.Tensor] = None

    def _swap(self, x: torch.Tensor) -> torch.Tensor:
        pending = self.exchange.start(x)  # leak: the received tensor is cloned and not dismissed
        if pending is None:
            return self.exchange.blocking(x)
        return pending.take().clone()

    def _swap_back(self, x: torch.Tensor) -> torch.Tensor:
        pending = self.exchange.start(x)  # clean: the received tensor is dismissed after the clone
        if pending is None:
            return self.exchange.blocking(x)
        recv = pending.take()
        out = recv.clone()
        self.tensors.dismiss(recv)
        return out

    def forward(self, q, k, v) -> torch.Tensor:
        q, k, v = self._swap(q), self._swap(k), self._swap(v)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self._swap_back(out)

    def cache_kv(self, kv: torch.Tensor) -> bool:
        t = self.tensors.summon_like(kv)  # leak: a second call overwrites cached_kv
        if t is None:
            return False
        t.copy_(kv)
        self.cached_kv = t
        return True

    def drop_kv(self) -> None:
        if self.cached_kv is not None:
            self.tensors.dismiss(self.cached_kv)
            self.cached_kv = None

    def score_chunks(self, q: torch.Tensor, chunks: List[torch.Tensor], floor: float) -> Tuple[float, int]:
        best, used = float("-inf"), 0
        for chunk in chunks:
            t = self.tensors.summon_like(chunk)  # leak: break below the floor leaves the loop with the tensor
            if t is None:
                continue
            t.copy_(chunk)
            score = float((q.mean() * t).amax())
            if score < floor:
                break
            best = max(best, score)
            used += 1
            self.tensors.dismiss(t)
        return best, used

    def pooled_mean(self, parts: List[torch.Tensor]) -> Optional[torch.Tensor]:
        acc = self.tensors.summon_like(parts[0], contiguous_only=True)  # clean: dismissed at the end
        if acc is None:
            return None
        acc.zero_()
        for p in parts:
            acc.add_(p)
        mean = acc / len(parts)
        self.tensors.dismiss(acc)
        return mean
