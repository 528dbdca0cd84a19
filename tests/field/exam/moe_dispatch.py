"""Expert-parallel dispatch with recycled token buffers."""
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class MoEConfig(NamedTuple):
    dim: int
    experts: int
    top_k: int = 2
    capacity: int = 64
    drop_tokens: bool = False


class DispatchBuffers:
    def __init__(self, cfg: MoEConfig, depth: int = 4):
        self.cfg = cfg
        self._stack: List[torch.Tensor] = []
        self._depth = depth

    def obtain(self) -> torch.Tensor:
        if self._stack:
            return self._stack.pop()  # clean: goes to the caller
        return torch.empty(self.cfg.experts, self.cfg.capacity, self.cfg.dim)

    def recycle(self, buf: torch.Tensor) -> None:
        if len(self._stack) < self._depth:
            self._stack.append(buf)


class Expert(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoELayer(nn.Module):
    def __init__(self, cfg: MoEConfig, buffers: DispatchBuffers):
        super().__init__()
        self.cfg = cfg
        self.buffers = buffers
        self.gate = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.experts = nn.ModuleList(Expert(cfg.dim) for _ in range(cfg.experts))
        self._kept: Dict[int, torch.Tensor] = {}

    def route(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        w, idx = self.gate(x).softmax(-1).topk(self.cfg.top_k, dim=-1)
        return w, idx

    def _dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> Tuple[torch.Tensor, List[int]]:
        buf = self.buffers.obtain()  # clean: first item of the returned tuple
        fill = [0] * self.cfg.experts
        for t in range(x.shape[0]):
            for e in idx[t].tolist():
                if fill[e] < self.cfg.capacity:
                    buf[e, fill[e]] = x[t]
                    fill[e] += 1
        return buf, fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, idx = self.route(x)
        buf, fill = self._dispatch(x, idx)  # clean: recycled after combine
        outs = [self.experts[e](buf[e, :n]) for e, n in enumerate(fill)]
        y = self._combine(outs, w, idx, x)
        self.buffers.recycle(buf)
        return y

    def _combine(self, outs, w, idx, x):
        y = torch.zeros_like(x)
        cursor = [0] * len(outs)
        for t in range(x.shape[0]):
            for j, e in enumerate(idx[t].tolist()):
                if cursor[e] < len(outs[e]):
                    y[t] += w[t, j] * outs[e][cursor[e]]
                    cursor[e] += 1
        return y

    def load(self, x: torch.Tensor) -> List[int]:
        _, idx = self.route(x)
        _, fill = self._dispatch(x, idx)  # leak: the buffer of the tuple is ignored
        return fill

    def expert_counts(self, x: torch.Tensor) -> List[int]:
        _, idx = self.route(x)
        buf, fill = self._dispatch(x, idx)  # clean: recycled
        self.buffers.recycle(buf)
        return fill

    def forward_capped(self, x: torch.Tensor) -> torch.Tensor:
        w, idx = self.route(x)
        buf, fill = self._dispatch(x, idx)  # leak: overflow with drop_tokens returns x early
        if self.cfg.drop_tokens and max(fill) >= self.cfg.capacity:
            return x
        outs = [self.experts[e](buf[e, :n]) for e, n in enumerate(fill)]
        y = self._combine(outs, w, idx, x)
        self.buffers.recycle(buf)
        return y

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.buffers.obtain()  # leak: buf is rebound to the softmax result, which is recycled instead
        buf.zero_()
        buf[0, : x.shape[0]].copy_(x)
        buf = F.softmax(buf, dim=-1)
        out = buf.sum(0)
        self.buffers.recycle(buf)
        return out

    def unit_norm(self, x: torch.Tensor) -> torch.Tensor:
        buf = self.buffers.obtain()  # clean: near miss, view and in-place division of the same storage
        buf.zero_()
        buf[0, : x.shape[0]].copy_(x)
        flat = buf.view(-1, self.cfg.dim)
        flat /= flat.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        out = flat.sum(0)
        self.buffers.recycle(buf)
        return out

    def keep(self, step: int, x: torch.Tensor) -> None:
        buf = self.buffers.obtain()  # leak: purge keeps the newest entry and drops the older without recycle
        buf[0, : x.shape[0]].copy_(x)
        self._kept[step] = buf

    def purge(self) -> None:
        if not self._kept:
            return
        newest = max(self._kept)
        self._kept = {newest: self._kept[newest]}

    def shadow(self, x: torch.Tensor, ref: Optional[torch.Tensor]) -> float:
        a = self.buffers.obtain()  # clean: recycled
        b = self.buffers.obtain() if ref is not None else None  # clean: near miss, None without ref, else recycled
        a[0, : x.shape[0]].copy_(x)
        diff = 0.0
        if b is not None:
            b[0, : ref.shape[0]].copy_(ref)
            diff = float((a - b).abs().max())
            self.buffers.recycle(b)
        self.buffers.recycle(a)
        return diff
