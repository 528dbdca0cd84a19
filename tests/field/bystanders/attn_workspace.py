import math
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class WorkspacePool:
    """Reusable scratch tensors keyed by (shape, dtype)."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._idle: Dict[Tuple[Tuple[int, ...], torch.dtype], List[torch.Tensor]] = {}

    def get_buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        stack = self._idle.get((tuple(shape), dtype))
        if stack:
            return stack.pop()
        return torch.empty(shape, dtype=dtype, device=self.device)

    def return_buffer(self, buf: torch.Tensor) -> None:
        self._idle.setdefault((tuple(buf.shape), buf.dtype), []).append(buf)


class PooledAttention(nn.Module):
    def __init__(self, dim: int, heads: int, pool: WorkspacePool, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.causal = causal
        self.pool = pool
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def _split(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        view = (b, t, self.heads, self.head_dim)
        return (q.view(view).transpose(1, 2), k.view(view).transpose(1, 2), v.view(view).transpose(1, 2))

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, h, t, _ = q.shape
        s = self.pool.get_buffer(b, h, t, k.shape[2])  # clean: handed to the caller
        torch.matmul(q, k.transpose(-1, -2), out=s)
        s.mul_(self.scale)
        return s

    def _causal_mask(self, t: int) -> torch.Tensor:
        mask = self.pool.get_buffer(t, t, dtype=torch.bool)  # clean: handed to the caller
        mask.fill_(True).triu_(1)
        return mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(x)
        s = self._scores(q, k)  # clean: returned to the pool after the softmax
        if self.causal:
            m = self._causal_mask(x.shape[1])  # clean: returned inside the branch that took it
            s.masked_fill_(m, float("-inf"))
            self.pool.return_buffer(m)
        probs = torch.softmax(s, dim=-1)
        self.pool.return_buffer(s)
        out = torch.matmul(probs, v).transpose(1, 2).reshape(x.shape)
        return self.proj(out)

    def forward_dropout(self, x: torch.Tensor, p: float) -> torch.Tensor:
        q, k, v = self._split(x)
        s = self._scores(q, k)  # leak: s is rebound to the softmax result, and that is what goes back
        s = torch.softmax(s, dim=-1)
        s = F.dropout(s, p, self.training)
        out = torch.matmul(s, v).transpose(1, 2).reshape(x.shape)
        self.pool.return_buffer(s)
        return self.proj(out)

    def forward_inplace(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(x)
        s = self._scores(q, k)  # clean: near miss, only in-place changes before the return
        s -= s.amax(dim=-1, keepdim=True)
        s.exp_()
        s /= s.sum(dim=-1, keepdim=True)
        out = torch.matmul(s, v).transpose(1, 2).reshape(x.shape)
        self.pool.return_buffer(s)
        return self.proj(out)

    def attention_map(self, x: torch.Tensor) -> torch.Tensor:
        """For visualisation: probabilities averaged over heads."""
        q, k, _ = self._split(x)
        return self._scores(q, k).softmax(-1).mean(dim=1)  # leak: the scores buffer is only read through a temporary

    def windowed(self, x: torch.Tensor, window: int) -> Optional[torch.Tensor]:
        b, t, d = x.shape
        acc = self.pool.get_buffer(b, t, d)  # leak: the short-input return leaves it out of the pool
        acc.zero_()
        if t < window:
            return None
        q, k, v = self._split(x)
        for start in range(0, t, window):
            end = min(start + window, t)
            part = self._scores(q[:, :, start:end], k[:, :, start:end])  # clean: returned each round
            o = torch.matmul(part.softmax(-1), v[:, :, start:end])
            acc[:, start:end].copy_(o.transpose(1, 2).reshape(b, end - start, d))
            self.pool.return_buffer(part)
        out = self.proj(acc)
        self.pool.return_buffer(acc)
        return out

    def warmup(self, batch: int, lengths: List[int]) -> None:
        held = []
        for t in lengths:
            held.append(self.pool.get_buffer(batch, self.heads, t, t))  # clean: the second loop returns all
        for buf in held:
            self.pool.return_buffer(buf)
