import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn


class WorkspaceManager:
    """Scratch tensors per shape; `acquire` falls back to a fresh one when none is idle."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device
        self._idle: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.outstanding = 0

    def acquire(self, *shape: int) -> torch.Tensor:
        bucket = self._idle.setdefault(shape, [])
        t = bucket.pop() if bucket else torch.empty(shape, device=self.device)  # clean: handed to the caller
        self.outstanding += 1
        return t

    def release(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        self._idle.setdefault(tuple(t.shape), []).append(t)


class PooledAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ws: Optional[WorkspaceManager] = None, softcap: float = 0.0):
        super().__init__()
        self.heads = heads
        self.hd = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.ws = ws
        self.softcap = softcap
        self._mask: Optional[torch.Tensor] = None

    def _split(self, x: torch.Tensor):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self._split(x)
        scores = None
        if self.ws is not None:
            scores = self.ws.acquire(b, self.heads, n, n)  # clean: near miss, released under the same guard
            torch.matmul(q, k.transpose(-1, -2), out=scores)
            scores.mul_(1.0 / math.sqrt(self.hd))
            probs = torch.softmax(scores, dim=-1)
        else:
            probs = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(self.hd), dim=-1)
        y = probs @ v
        if self.ws is not None:
            self.ws.release(scores)
        return self.o(y.transpose(1, 2).reshape(b, n, d))

    def forward_capped(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self._split(x)
        scores = self.ws.acquire(b, self.heads, n, n)  # leak: with a soft cap the name is bound to a new tensor
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        y = torch.softmax(scores, dim=-1) @ v
        self.ws.release(scores)
        return self.o(y.transpose(1, 2).reshape(b, n, d))

    def forward_capped_(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self._split(x)
        scores = self.ws.acquire(b, self.heads, n, n)  # clean: near miss, the capping is in place
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        if self.softcap > 0:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        y = torch.softmax(scores, dim=-1) @ v
        self.ws.release(scores)
        return self.o(y.transpose(1, 2).reshape(b, n, d))

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s = self.ws.acquire(q.shape[0], k.shape[0])  # leak: a single key returns v at once
        if k.shape[0] == 1:
            return v.expand_as(q)
        torch.mm(q, k.t(), out=s)
        out = torch.softmax(s, -1) @ v
        self.ws.release(s)
        return out

    def decode_into(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self.ws.acquire(q.shape[0], v.shape[1])  # clean: handed to the caller
        torch.mm(torch.softmax(q @ k.t(), -1), v, out=out)
        return out

    def decode_projected(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        att = self.decode_into(q, k, v)  # leak: projected and dropped
        return self.o(att)

    def decode_linear(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        att = self.decode_into(q, k, v)  # clean: released after the projection
        y = self.o(att)
        self.ws.release(att)
        return y

    def mask(self, n: int) -> torch.Tensor:
        if self._mask is None or self._mask.shape[0] < n:
            if self._mask is not None:
                self.ws.release(self._mask)
            self._mask = self.ws.acquire(n, n)  # clean: near miss, the smaller one was released, teardown() releases the last
            self._mask.fill_(float("-inf")).triu_(1)
        return self._mask[:n, :n]

    def teardown(self) -> None:
        if self._mask is not None:
            self.ws.release(self._mask)
            self._mask = None


class SlidingAttention(PooledAttention):
    def __init__(self, dim: int, heads: int, window: int, ws: WorkspaceManager):
        super().__init__(dim, heads, ws)
        self.window = window
        self.bias = ws.acquire(window, window)  # leak: the inherited teardown() does not know the bias
        self.bias.zero_()

    def chunked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs = []
        for i in range(0, q.shape[0], self.window):
            qi = q[i : i + self.window]
            s = self.ws.acquire(qi.shape[0], k.shape[0])  # clean: released in every round
            torch.mm(qi, k.t(), out=s)
            outs.append(F.softmax(s, -1) @ v)
            self.ws.release(s)
        return torch.cat(outs)

    def chunked_early(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limit: int) -> torch.Tensor:
        outs = []
        for i in range(0, q.shape[0], self.window):
            qi = q[i : i + self.window]
            s = self.ws.acquire(qi.shape[0], k.shape[0])  # leak: the break at the limit skips the release
            torch.mm(qi, k.t(), out=s)
            outs.append(F.softmax(s, -1) @ v)
            if len(outs) == limit:
                break
            self.ws.release(s)
        return torch.cat(outs)
