"""Sliding-window attention with optional caller-owned workspaces."""
from typing import NamedTuple, Optional, Tuple
import math

import torch
import torch.nn as nn
from torch import Tensor


class WS(NamedTuple):
    scores: Tensor
    out: Tensor


class WorkspaceProvider:
    def __init__(self, heads: int, max_q: int, max_k: int, head_dim: int, copies: int = 2) -> None:
        self._all = [
            WS(torch.empty(heads, max_q, max_k), torch.empty(heads, max_q, head_dim)) for _ in range(copies)
        ]
        self._taken = [False] * copies

    def checkout_ws(self) -> WS:
        i = self._taken.index(False)
        self._taken[i] = True
        return self._all[i]

    def checkin_ws(self, ws: WS) -> None:
        i = next(j for j, w in enumerate(self._all) if w is ws)
        self._taken[i] = False


class WindowAttention(nn.Module):
    def __init__(self, dim: int, heads: int, window: int, provider: Optional[WorkspaceProvider] = None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.scale = 1 / math.sqrt(dim // heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.provider = provider

    def _qkv(self, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        def split(t: Tensor) -> Tensor:
            return t.view(t.shape[0], self.heads, -1).transpose(0, 1)
        return split(q), split(k), split(v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ws: WS) -> Tensor:
        nq, nk = q.shape[1], k.shape[1]
        s = ws.scores[:, :nq, :nk]
        torch.matmul(q, k.transpose(1, 2), out=s)
        s.mul_(self.scale)
        i = torch.arange(nq).unsqueeze(1)
        s.masked_fill_((torch.arange(nk) > i) | (torch.arange(nk) < i - self.window), float("-inf"))
        o = ws.out[:, :nq]
        torch.matmul(s.softmax(-1), v, out=o)
        return o

    def forward(self, x: Tensor, ws: Optional[WS] = None) -> Tensor:
        owned = ws is None
        if owned:
            ws = self.provider.checkout_ws()  # clean: near miss, checked in if it is ours
        y = self._attend(*self._qkv(x), ws).transpose(0, 1).reshape(x.shape).clone()
        if owned:
            self.provider.checkin_ws(ws)
        return y

    def forward_cond(self, x: Tensor, ws: Optional[WS] = None, keep: bool = False) -> Tensor:
        owned = ws is None
        if owned:
            ws = self.provider.checkout_ws()  # leak: with keep set nobody checks it in
        y = self._attend(*self._qkv(x), ws).transpose(0, 1).reshape(x.shape).clone()
        if owned and not keep:
            self.provider.checkin_ws(ws)
        return y

    def attend_lazy(self, x: Tensor) -> Tuple[Tensor, Optional[WS]]:
        """The result is a view; the caller checks the workspace in."""
        if self.provider is None:
            q, k, v = self._qkv(x)
            return (q @ k.transpose(1, 2) * self.scale).softmax(-1) @ v, None
        ws = self.provider.checkout_ws()  # clean: handed to the caller
        return self._attend(*self._qkv(x), ws), ws

    def pooled_mean(self, x: Tensor) -> Tensor:
        y, ws = self.attend_lazy(x)  # clean: near miss, None means no provider
        m = y.mean(1)
        if ws is not None:
            self.provider.checkin_ws(ws)
        return m

    def pooled_max(self, x: Tensor) -> Tensor:
        y, _ = self.attend_lazy(x)  # leak: the workspace is assigned to the underscore
        return y.amax(1)

    def norm(self, x: Tensor) -> float:
        return self.attend_lazy(x)[0].norm().item()  # leak: only the first element is taken


class CrossWindowAttention(WindowAttention):
    def __init__(self, *args, **kw) -> None:
        super().__init__(*args, **kw)
        self.memory_ws: Optional[WS] = None

    def bind(self, memory: Tensor) -> None:
        if self.provider is None:
            return
        if self.memory_ws is not None:
            self.provider.checkin_ws(self.memory_ws)
        self.memory_ws = self.provider.checkout_ws()  # clean: near miss, the old one went back, unbind() handles the last
        self.memory_ws.out[:, : memory.shape[0]].copy_(memory.view(memory.shape[0], self.heads, -1).transpose(0, 1))

    def unbind(self) -> None:
        if self.provider is not None and self.memory_ws is not None:
            self.provider.checkin_ws(self.memory_ws)
            self.memory_ws = None

    def forward(self, x: Tensor, ws: Optional[WS] = None) -> Tensor:
        if self.memory_ws is None:
            return super().forward(x, ws)
        own = self.provider.checkout_ws()  # leak: a short memory returns before checkin
        n = x.shape[0]
        if self.memory_ws.out.shape[1] < n:
            return x
        mem = self.memory_ws.out[:, :n]
        y = self._attend(mem, mem, mem, own).transpose(0, 1).reshape(n, -1).clone()
        self.provider.checkin_ws(own)
        return y

    def chunks(self, x: Tensor, size: int) -> Tensor:
        ws = self.provider.checkout_ws()  # clean: one for all chunks, passed down as caller-owned
        outs = [WindowAttention.forward(self, part, ws) for part in x.split(size)]
        self.provider.checkin_ws(ws)
        return torch.cat(outs)

    def two_pass(self, x: Tensor) -> Tensor:
        ws = self.provider.checkout_ws()  # leak: the second checkout overwrites the first
        y = self._attend(*self._qkv(x), ws).transpose(0, 1).reshape(x.shape).clone()
        ws = self.provider.checkout_ws()  # clean: checked in at the end
        y = self._attend(*self._qkv(y), ws).transpose(0, 1).reshape(x.shape).clone()
        self.provider.checkin_ws(ws)
        return y

    def two_pass_swap(self, x: Tensor) -> Tensor:
        first = self.provider.checkout_ws()  # clean: near miss, checked in between the passes
        y = self._attend(*self._qkv(x), first).transpose(0, 1).reshape(x.shape).clone()
        self.provider.checkin_ws(first)
        first = self.provider.checkout_ws()  # clean: checked in at the end
        y = self._attend(*self._qkv(y), first).transpose(0, 1).reshape(x.shape).clone()
        self.provider.checkin_ws(first)
        return y
