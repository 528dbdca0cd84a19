"""Single-token decode attention on top of a scratch arena."""
from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
from torch import nn

logger = logging.getLogger(__name__)


@dataclass
class AttnConfig:
    num_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float16
    logit_cap: float = 0.0
    debug_dump: bool = False


class ScratchArena:
    """Keeps a few float buffers per shape alive between decode steps."""

    def __init__(self, device: torch.device, limit: int = 64) -> None:
        self.device = device
        self.limit = limit
        self._idle: Dict[Tuple[Tuple[int, ...], torch.dtype], List[torch.Tensor]] = {}
        self._lent = 0

    def rent(self, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._lent >= self.limit:
            raise RuntimeError(f"scratch arena exhausted ({self._lent} buffers lent)")
        bucket = self._idle.setdefault((tuple(shape), dtype), [])
        buf = bucket.pop() if bucket else torch.empty(shape, dtype=dtype, device=self.device)  # clean: handed to the caller
        self._lent += 1
        return buf

    def hand_back(self, buf: torch.Tensor) -> None:
        self._idle.setdefault((tuple(buf.shape), buf.dtype), []).append(buf)
        self._lent -= 1


class DecodeAttention(nn.Module):
    def __init__(self, cfg: AttnConfig, arena: ScratchArena) -> None:
        super().__init__()
        self.cfg = cfg
        self.arena = arena
        self.scale = 1.0 / math.sqrt(cfg.head_dim)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """q: [B, H, D], k: [B, H, S, D] -> probabilities [B, H, S]."""
        b, h, s, _ = k.shape
        logits = self.arena.rent((b, h, s), q.dtype)  # clean: near miss, scaled in place and given back after softmax made a fresh tensor
        logits.copy_(torch.einsum("bhd,bhsd->bhs", q, k))
        logits *= self.scale
        if self.cfg.logit_cap > 0:
            logits.div_(self.cfg.logit_cap).tanh_().mul_(self.cfg.logit_cap)
        probs = torch.softmax(logits, dim=-1)
        self.arena.hand_back(logits)
        return probs

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        probs = self.scores(q, k)
        acc = self.arena.rent(tuple(q.shape), q.dtype)  # leak: rebound to the float32 copy, the rented buffer itself never returns
        torch.matmul(probs.unsqueeze(-2), v, out=acc.unsqueeze(-2))
        acc = acc.float()
        if torch.isnan(acc).any():
            logger.warning("nan in decode attention output")
        result = acc.clone()
        self.arena.hand_back(acc)
        return result

    def forward_grouped(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
        b, h, d = q.shape
        out = torch.empty_like(q)
        for g in range(groups):
            heads = slice(g * h // groups, (g + 1) * h // groups)
            width = heads.stop - heads.start
            part = self.arena.rent((b, width, d), q.dtype)  # leak: groups of no width go on to the next without handing back
            if width == 0:
                continue
            probs = self.scores(q[:, heads], k[:, heads])
            part.copy_((probs.unsqueeze(-2) @ v[:, heads]).squeeze(-2))
            out[:, heads] = part
            self.arena.hand_back(part)
        return out

    def lse(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, h, s, _ = k.shape
        buf = self.arena.rent((b * h, s), q.dtype)  # clean: near miss, grid is a view, the base is handed back
        grid = buf.view(b, h, s)
        grid.copy_(torch.einsum("bhd,bhsd->bhs", q, k))
        grid.mul_(self.scale)
        res = torch.logsumexp(grid, dim=-1)
        self.arena.hand_back(buf)
        return res

    def merge_partials(
        self, outs: List[torch.Tensor], lses: List[torch.Tensor]
    ) -> Optional[torch.Tensor]:
        """Combine split-k partial results; None when the splits are inconsistent."""
        if not outs:
            return None
        total = self.arena.rent(tuple(outs[0].shape), outs[0].dtype)  # leak: the mismatch return leaves both buffers out
        norm = self.arena.rent(tuple(lses[0].shape), lses[0].dtype)  # leak: the mismatch return leaves both buffers out
        total.zero_()
        norm.fill_(float("-inf"))
        for o, l in zip(outs, lses):
            if o.shape != total.shape:
                logger.error("split-k shape mismatch: %s vs %s", o.shape, total.shape)
                return None
            new = torch.logaddexp(norm, l)
            total.mul_((norm - new).exp().unsqueeze(-1))
            total.add_(o * (l - new).exp().unsqueeze(-1))
            norm.copy_(new)
        merged = total.clone()
        self.arena.hand_back(norm)
        self.arena.hand_back(total)
        return merged

    def sink_bias(self, q: torch.Tensor, sink: Optional[torch.Tensor]) -> torch.Tensor:
        bias = self.arena.rent((q.shape[0], q.shape[1]), q.dtype)  # clean: both branches hand back
        if sink is None:
            bias.zero_()
            res = bias.clone()
            self.arena.hand_back(bias)
            return res
        bias.copy_(sink.expand_as(bias))
        res = bias * self.scale
        self.arena.hand_back(bias)
        return res
