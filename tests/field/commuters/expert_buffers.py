"""MoE dispatch: per-expert token buffers drawn from a two-level store."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn


@dataclass
class ExpertBuffer:
    tier: str
    data: torch.Tensor
    used: int = 0

    def write(self, x: torch.Tensor) -> None:
        n = x.shape[0]
        self.data[self.used:self.used + n].copy_(x)
        self.used += n

    @property
    def tokens(self) -> torch.Tensor:
        return self.data[: self.used]


class BufferTiers:
    """Small buffers for cold experts, big ones for hot experts."""

    def __init__(self, dim: int, small: int, big: int, n_small: int, n_big: int) -> None:
        self.cap = {"small": small, "big": big}
        self._stock: dict[str, list[ExpertBuffer]] = {
            "small": [ExpertBuffer("small", torch.empty(small, dim)) for _ in range(n_small)],
            "big": [ExpertBuffer("big", torch.empty(big, dim)) for _ in range(n_big)],
        }

    def issue(self, tier: str) -> Optional[ExpertBuffer]:
        stock = self._stock[tier]
        return stock.pop() if stock else None  # clean: straight to the caller

    def issue_for(self, tokens: int) -> Optional[ExpertBuffer]:
        if tokens <= self.cap["small"]:
            buf = self.issue("small")  # clean: near miss, only None falls through to the big tier
            if buf is not None:
                return buf
        return self.issue("big")  # clean: handed through

    def recycle(self, buf: ExpertBuffer) -> None:
        buf.used = 0
        self._stock[buf.tier].append(buf)


class MoELayer(nn.Module):
    def __init__(self, dim: int, experts: int, top_k: int, tiers: BufferTiers) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))
        self.top_k = top_k
        self.tiers = tiers
        self.overflow: dict[int, ExpertBuffer] = {}

    def _route(self, x: torch.Tensor) -> list[torch.Tensor]:
        idx = self.gate(x).topk(self.top_k, dim=-1).indices
        return [(idx == e).any(-1).nonzero().flatten() for e in range(len(self.experts))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, rows in enumerate(self._route(x)):
            if rows.numel() == 0:
                continue
            buf = self.tiers.issue_for(rows.numel())  # clean: near miss, the idle-expert continue comes before
            if buf is None:
                out.index_add_(0, rows, self.experts[e](x[rows]))
                continue
            buf.write(x[rows])
            out.index_add_(0, rows, self.experts[e](buf.tokens))
            self.tiers.recycle(buf)
        return out

    def forward_capacity(self, x: torch.Tensor, capacity: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, rows in enumerate(self._route(x)):
            buf = self.tiers.issue_for(min(rows.numel(), capacity))  # leak: an expert without rows continues with its buffer
            if buf is None:
                continue
            kept = rows[:capacity]
            if kept.numel() == 0:
                continue
            buf.write(x[kept])
            out.index_add_(0, kept, self.experts[e](buf.tokens))
            self.tiers.recycle(buf)
        return out

    def spill(self, expert: int, x: torch.Tensor) -> bool:
        buf = self.overflow.get(expert)
        if buf is None:
            buf = self.tiers.issue("big")  # clean: lives in overflow, flush recycles it
            if buf is None:
                return False
            self.overflow[expert] = buf
        if buf.used + x.shape[0] > buf.data.shape[0]:
            return False
        buf.write(x)
        return True

    def spill_fresh(self, expert: int, x: torch.Tensor) -> bool:
        buf = self.tiers.issue_for(x.shape[0])  # leak: an overflow buffer the expert already had is replaced
        if buf is None:
            return False
        buf.write(x)
        self.overflow[expert] = buf
        return True

    def flush(self) -> dict[int, torch.Tensor]:
        done: dict[int, torch.Tensor] = {}
        for e in list(self.overflow):
            buf = self.overflow.pop(e)
            done[e] = self.experts[e](buf.tokens)
            self.tiers.recycle(buf)
        return done


def gather_all(layer: MoELayer, parts: list[torch.Tensor]) -> Optional[torch.Tensor]:
    held: list[ExpertBuffer] = []
    for part in parts:
        buf = layer.tiers.issue_for(part.shape[0])  # leak: running short returns None with the earlier ones held
        if buf is None:
            return None
        buf.write(part)
        held.append(buf)
    merged = torch.cat([b.tokens for b in held])
    for buf in held:
        layer.tiers.recycle(buf)
    return merged


def gather_or_copy(layer: MoELayer, parts: list[torch.Tensor]) -> torch.Tensor:
    held: list[ExpertBuffer] = []
    try:
        for part in parts:
            buf = layer.tiers.issue_for(part.shape[0])  # clean: near miss, the finally recycles also when it runs short
            if buf is None:
                return torch.cat(parts)
            buf.write(part)
            held.append(buf)
        return torch.cat([b.tokens for b in held])
    finally:
        for b in held:
            layer.tiers.recycle(b)


def upsize(tiers: BufferTiers, buf: ExpertBuffer) -> ExpertBuffer:
    """Takes over buf; the caller goes on with the result."""
    bigger = tiers.issue("big")  # clean: near miss, either this or the old one is returned and the other recycled
    if bigger is None:
        return buf
    bigger.write(buf.tokens)
    tiers.recycle(buf)
    return bigger


def profile_expert(tiers: BufferTiers, expert: nn.Module, x: torch.Tensor) -> float:
    buf = tiers.issue("small")  # leak: an input beyond the small capacity is turned away after issuing
    if buf is None or x.shape[0] > tiers.cap["small"]:
        return -1.0
    buf.write(x)
    norm = float(expert(buf.tokens).norm())
    tiers.recycle(buf)
    return norm
