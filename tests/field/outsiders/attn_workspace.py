import math
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class WorkspacePool:
    """Keeps scratch tensors per (shape, dtype) so that decode steps do not allocate."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._idle: Dict[Tuple, List[torch.Tensor]] = {}
        self.outstanding = 0

    def borrow(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.outstanding += 1
        idle = self._idle.get((shape, dtype))
        if idle:
            return idle.pop()
        return torch.empty(shape, dtype=dtype, device=self.device)

    def give_back(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._idle.setdefault((tuple(t.shape), t.dtype), []).append(t)


class PooledAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ws: WorkspacePool, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.dropout = dropout
        self.ws = ws

    def _split(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        b, h, t, _ = q.shape
        scores = self.ws.borrow(b, h, t, k.shape[2])  # clean: handed to the caller
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        return scores.mul_(self.scale)

    def forward(self, x: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self._split(x)
        scores = self._scores(q, k)  # clean: in-place softmax input, returned to the pool below
        if mask is not None:
            scores.masked_fill_(mask, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        self.ws.give_back(scores)
        if self.training and self.dropout:
            probs = F.dropout(probs, self.dropout)
        out = torch.matmul(probs, v).transpose(1, 2).reshape(b, t, d)
        return self.proj(out)

    def forward_scaled(self, x: torch.Tensor, temperature: float) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self._split(x)
        scores = self._scores(q, k)  # leak: rebound to the quotient, which is what goes back
        scores = scores / temperature
        probs = torch.softmax(scores, dim=-1)
        self.ws.give_back(scores)
        return self.proj(torch.matmul(probs, v).transpose(1, 2).reshape(b, t, d))

    def attention_entropy(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self._split(x)
        probs = self._scores(q, k).softmax(dim=-1)  # leak: only the softmax is kept, nobody has the scratch tensor
        return -(probs * probs.clamp_min(1e-9).log()).sum(-1).mean()

    def decode_step(self, x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        q, _, _ = self._split(x)
        b, h, t, hd = q.shape
        scores = self.ws.borrow(b, h, t, k_cache.shape[2])  # clean: released in the finally
        acc = self.ws.borrow(b, h, t, hd)  # clean: near miss, the in-place ops keep the name on the lease and a copy leaves
        try:
            torch.matmul(q, k_cache.transpose(-1, -2), out=scores)
            scores *= self.scale
            torch.matmul(scores.softmax(-1), v_cache, out=acc)
            acc = acc.mul_(1.0)
            return self.proj(acc.transpose(1, 2).reshape(b, t, h * hd).clone())
        finally:
            self.ws.give_back(scores)
            self.ws.give_back(acc)

    def chunked(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        q, k, v = self._split(x)
        b, h, t, hd = q.shape
        outs = []
        for start in range(0, t, chunk):
            qs = q[:, :, start:start + chunk]
            buf = self.ws.borrow(b, h, qs.shape[2], t)  # leak: chunks without a finite score go on before give_back
            torch.matmul(qs, k.transpose(-1, -2), out=buf)
            if not torch.isfinite(buf).any():
                outs.append(torch.zeros_like(qs))
                continue
            outs.append(torch.matmul(buf.softmax(-1), v))
            self.ws.give_back(buf)
        return torch.cat(outs, dim=2)

    def relative_bias(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        t = x.shape[1]
        idx = self.ws.borrow(t, t, dtype=torch.int64)  # clean: returned after the lookup
        pos = torch.arange(t, device=idx.device)
        torch.sub(pos[:, None], pos[None, :], out=idx)
        idx.clamp_(-8, 8).add_(8)
        bias = table[idx]
        self.ws.give_back(idx)
        return bias

    def warmup(self, b: int, t: int) -> None:
        held = [self.ws.borrow(b, self.heads, t, t) for _ in range(2)]  # clean: near miss, both go back in the loop
        for h in held:
            self.ws.give_back(h)
        self.ws.borrow(b, self.heads, t, self.head_dim)  # leak: result is thrown away
