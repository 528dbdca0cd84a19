"""Multi-head attention with a workspace pool for the score and output buffers."""
from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn

logger = logging.getLogger(__name__)


@dataclass
class AttnConfig:
    hidden: int = 512
    heads: int = 8
    dropout: float = 0.0
    use_workspace: bool = True
    return_probs: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Workspace:
    """Shape-keyed free list of tensors."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.dtype = dtype
        self._free: Dict[Tuple[int, ...], List[torch.Tensor]] = {}
        self._out = 0

    def get(self, shape: Tuple[int, ...]) -> torch.Tensor:
        bucket = self._free.get(shape)
        self._out += 1
        if bucket:
            return bucket.pop()  # clean: handed to the caller
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def put(self, t: torch.Tensor) -> None:
        self._out -= 1
        self._free.setdefault(tuple(t.shape), []).append(t)


class PooledAttention(nn.Module):
    def __init__(self, cfg: AttnConfig, ws: Optional[Workspace] = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.ws = ws
        self.qkv = nn.Linear(cfg.hidden, 3 * cfg.hidden)
        self.proj = nn.Linear(cfg.hidden, cfg.hidden)
        self.scale = 1.0 / math.sqrt(cfg.head_dim)

    def _split(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        shape = (b, s, self.cfg.heads, self.cfg.head_dim)
        return (
            q.view(shape).transpose(1, 2),
            k.view(shape).transpose(1, 2),
            v.view(shape).transpose(1, 2),
        )

    def forward(self, x: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        q, k, v = self._split(x)
        b, h, s, d = q.shape
        if self.ws is not None:
            scores = self.ws.get((b, h, s, s))  # clean: near miss, same guard gives it back below
        else:
            scores = torch.empty((b, h, s, s), device=x.device, dtype=x.dtype)
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        scores.mul_(self.scale)
        if mask is not None:
            scores.masked_fill_(mask, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        ctx = torch.matmul(probs, v).transpose(1, 2).reshape(b, s, h * d)
        if self.ws is not None:
            self.ws.put(scores)
        return self.proj(ctx)

    def forward_scaled(self, ws: Workspace, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, h, s, _ = q.shape
        scores = ws.get((b, h, s, s))  # leak: rebinding by "scores = scores * scale" loses the pooled tensor
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        scores = scores * self.scale
        result = scores.softmax(dim=-1)
        ws.put(scores)
        return result

    def forward_inplace(self, ws: Workspace, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, h, s, _ = q.shape
        scores = ws.get((b, h, s, s))  # clean: near miss, in-place operators keep the same tensor
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        scores *= self.scale
        scores = scores.sub_(scores.amax(dim=-1, keepdim=True))
        result = scores.softmax(dim=-1)
        ws.put(scores)
        return result

    def _pooled_context(self, ws: Workspace, probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = ws.get(tuple(v.shape))  # clean: returned to the caller
        torch.matmul(probs, v, out=out)
        return out

    def context_copy(self, ws: Workspace, probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx = self._pooled_context(ws, probs, v)  # leak: cloned, the pooled tensor itself is dropped
        return ctx.clone()

    def context_merge(self, ws: Workspace, probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx = self._pooled_context(ws, probs, v)  # clean: copied and put back
        b, h, s, d = ctx.shape
        merged = ctx.transpose(1, 2).reshape(b, s, h * d).clone()
        ws.put(ctx)
        return self.proj(merged)

    def attend_windowed(self, ws: Workspace, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> List[torch.Tensor]:
        outs: List[torch.Tensor] = []
        s = q.shape[2]
        for start in range(0, s, window):
            end = min(start + window, s)
            qs = q[:, :, start:end]
            buf = ws.get((q.shape[0], q.shape[1], end - start, s))  # leak: the continue for non-finite scores skips put
            torch.matmul(qs, k.transpose(-1, -2), out=buf)
            if not torch.isfinite(buf).all():
                logger.warning("non-finite scores in window %d..%d", start, end)
                continue
            outs.append(torch.matmul(buf.softmax(-1), v))
            ws.put(buf)
        return outs

    def probs_if_asked(self, ws: Workspace, q: torch.Tensor, k: torch.Tensor) -> Optional[torch.Tensor]:
        b, h, s, _ = q.shape
        buf = ws.get((b, h, s, s))  # leak: early return when probabilities are not wanted
        torch.matmul(q, k.transpose(-1, -2), out=buf)
        if not self.cfg.return_probs:
            return None
        probs = buf.softmax(-1)
        ws.put(buf)
        return probs

    def lse(self, ws: Workspace, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, h, s, _ = q.shape
        buf = ws.get((b, h, s, s))  # clean: released in finally
        try:
            torch.matmul(q, k.transpose(-1, -2), out=buf)
            return torch.logsumexp(buf * self.scale, dim=-1)
        finally:
            ws.put(buf)
