from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

from .manager import Extent, WorkspaceManager


@dataclass
class ExpertShapes:
    tokens: int
    hidden: int
    inter: int
    experts: int


class FusedExperts:
    def __init__(self, w1: torch.Tensor, w2: torch.Tensor, ws: WorkspaceManager, chunk: int = 0):
        self.w1 = w1
        self.w2 = w2
        self.ws = ws
        self.chunk = chunk
        self.sticky: Optional[Extent] = None

    def workspaces(self, s: ExpertShapes) -> Optional[tuple[Extent, Extent]]:
        a = self.ws.carve(s.tokens * s.inter)  # clean: given back if the second fails, else returned in the pair
        if a is None:
            return None
        b = self.ws.carve(s.tokens * s.hidden)  # clean: None or returned in the pair
        if b is None:
            self.ws.uncarve(a)
            return None
        return a, b

    def drop(self, pair: tuple[Extent, Extent]) -> None:
        for ext in pair:
            self.ws.uncarve(ext)

    def apply(self, x: torch.Tensor, s: ExpertShapes) -> torch.Tensor:
        pair = self.workspaces(s)  # clean: near miss, fallback path only for None, drop takes both
        if pair is None:
            return F.silu(x @ self.w1[0]) @ self.w2[0]
        a, b = pair
        t1 = self.ws.tensor(a, s.tokens, s.inter)
        t2 = self.ws.tensor(b, s.tokens, s.hidden)
        torch.matmul(x, self.w1[0], out=t1)
        F.silu(t1, inplace=True)
        torch.matmul(t1, self.w2[0], out=t2)
        y = t2.clone()
        self.drop(pair)
        return y

    def apply_no_tokens(self, x: torch.Tensor, s: ExpertShapes) -> torch.Tensor:
        pair = self.workspaces(s)  # leak: a batch without tokens returns with both extents
        if pair is None:
            raise RuntimeError("workspace too small")
        if s.tokens == 0:
            return x.new_empty(0, s.hidden)
        t1 = self.ws.tensor(pair[0], s.tokens, s.inter)
        torch.matmul(x, self.w1[0], out=t1)
        y = t1 @ self.w2[0]
        self.drop(pair)
        return y

    def gate_only(self, x: torch.Tensor, s: ExpertShapes) -> Optional[torch.Tensor]:
        pair = self.workspaces(s)  # leak: only the first extent of the pair is given back
        if pair is None:
            return None
        t1 = self.ws.tensor(pair[0], s.tokens, s.inter)
        torch.matmul(x, self.w1[0], out=t1)
        y = t1.sigmoid()
        self.ws.uncarve(pair[0])
        return y

    def ensure_sticky(self, numel: int) -> torch.Tensor:
        if self.sticky is None or self.sticky.size < numel:
            if self.sticky is not None:
                self.ws.uncarve(self.sticky)
            self.sticky = self.ws.carve(numel)  # clean: near miss, the smaller one was given back, close takes the last
        if self.sticky is None:
            raise MemoryError(numel)
        return self.ws.tensor(self.sticky, numel)

    def close(self) -> None:
        if self.sticky is not None:
            self.ws.uncarve(self.sticky)
            self.sticky = None

    def chunked(self, x: torch.Tensor) -> torch.Tensor:
        ext = self.ws.carve(self.chunk * self.w1.shape[-1]) if self.chunk else None  # leak: None-checked on return, but the odd-size raise comes first
        if self.chunk and x.shape[0] % self.chunk:
            raise ValueError("token count is no multiple of the chunk")
        outs = []
        for part in x.split(self.chunk or x.shape[0]):
            h = part @ self.w1[0]
            if ext is not None:
                self.ws.tensor(ext, *h.shape).copy_(h)
            outs.append(h @ self.w2[0])
        if ext is not None:
            self.ws.uncarve(ext)
        return torch.cat(outs)
