"""Dilated (LongNet style) attention; scratch handling lives in a mixin."""
from __future__ import annotations

from typing import List, Optional, Sequence

import torch
from torch import Tensor, nn


class ScratchPool:
    def __init__(self, numel: int, count: int, dtype: torch.dtype = torch.float32):
        self._stack: List[Tensor] = [torch.empty(numel, dtype=dtype) for _ in range(count)]

    def pop_scratch(self) -> Tensor:
        return self._stack.pop()

    def push_scratch(self, t: Tensor) -> None:
        self._stack.append(t)


class ScratchMixin:
    scratch: ScratchPool
    _ws: Optional[Tensor] = None

    def begin(self) -> None:
        if self._ws is None:
            self._ws = self.scratch.pop_scratch()  # clean: near miss, end() puts it back and begin() never overwrites one

    def end(self) -> None:
        if self._ws is not None:
            self.scratch.push_scratch(self._ws)
            self._ws = None

    def ws_view(self, *shape: int) -> Tensor:
        n = 1
        for s in shape:
            n *= s
        return self._ws[:n].view(*shape)


class DilatedBase(nn.Module):
    def __init__(self, dim: int, scratch: ScratchPool):
        super().__init__()
        self.dim = dim
        self.scratch = scratch
        self.tmp: Optional[Tensor] = None
        self.stats: Optional[Tensor] = None

    def open_scratch(self) -> None:
        self.tmp = self.scratch.pop_scratch()  # clean: close_scratch of every subclass hands it back

    def close_scratch(self) -> None:
        if self.tmp is not None:
            self.scratch.push_scratch(self.tmp)
            self.tmp = None


class DilatedAttention(ScratchMixin, DilatedBase):
    def __init__(self, dim: int, scratch: ScratchPool, segment: int = 64, rate: int = 2):
        super().__init__(dim, scratch)
        self.segment = segment
        self.rate = rate
        self.qkv = nn.Linear(dim, 3 * dim)

    def _sparsify(self, x: Tensor, offset: int) -> Tensor:
        ws = self.scratch.pop_scratch()  # clean: the view is handed out, the caller pushes its base
        part = x[offset :: self.rate]
        view = ws[: part.numel()].view_as(part)
        view.copy_(part)
        return view

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        try:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            view = self.ws_view(q.shape[0], k.shape[0])
            torch.mm(q, k.t(), out=view)
            return torch.softmax(view, dim=-1) @ v
        finally:
            self.end()

    def forward_offset(self, x: Tensor, offset: int) -> Tensor:
        part = self._sparsify(x, offset)  # clean: near miss, the base of the view is pushed back
        out = self.qkv(part)[..., : self.dim]
        self.scratch.push_scratch(part._base)
        return out

    def forward_offsets(self, x: Tensor) -> Tensor:
        acc = torch.zeros_like(x)
        for off in range(self.rate):
            part = self._sparsify(x, off)  # leak: the rebinding by contiguous() + 0 loses the view and its base
            part = part.contiguous() + 0
            acc[off :: self.rate] += part
        return acc

    def norms(self, x: Tensor) -> List[float]:
        return [float(self._sparsify(x, off).norm()) for off in range(self.rate)]  # leak: one scratch per offset is dropped


class DilatedWithStats(DilatedBase):
    def open_scratch(self) -> None:
        super().open_scratch()
        self.stats = self.scratch.pop_scratch()  # leak: the override of close_scratch leaves stats out

    def close_scratch(self) -> None:
        super().close_scratch()
        self.stats = None

    def run(self, x: Tensor) -> float:
        self.open_scratch()
        flat = x.reshape(-1)
        self.tmp[: flat.numel()].copy_(flat)
        self.stats[: flat.numel()].copy_(flat.abs())
        peak = float(self.stats[: flat.numel()].max())
        self.close_scratch()
        return peak


class DilatedWithHistory(DilatedBase):
    def __init__(self, dim: int, scratch: ScratchPool, keep: int):
        super().__init__(dim, scratch)
        self.keep = keep
        self.history: List[Tensor] = []
        self.recent: List[Tensor] = []

    def remember(self, x: Tensor) -> None:
        t = self.scratch.pop_scratch()  # clean: near miss, the oldest entry is pushed back when the list is cut
        t[: x.numel()].copy_(x.reshape(-1))
        self.history.append(t)
        while len(self.history) > self.keep:
            self.scratch.push_scratch(self.history.pop(0))

    def remember_fast(self, x: Tensor) -> None:
        t = self.scratch.pop_scratch()  # leak: the slice cuts old entries off without pushing them back
        t[: x.numel()].copy_(x.reshape(-1))
        self.recent.append(t)
        self.recent = self.recent[-self.keep :]

    def close_scratch(self) -> None:
        for t in self.history + self.recent:
            self.scratch.push_scratch(t)
        self.history.clear()
        self.recent.clear()
        super().close_scratch()


def multi_rate(layers: Sequence[DilatedAttention], x: Tensor, weights: Sequence[float]) -> Tensor:
    pool = layers[0].scratch
    acc = pool.pop_scratch()  # clean: near miss, views of acc come and go, acc itself goes back
    out = acc[: x.numel()].view_as(x)
    out.zero_()
    for layer, w in zip(layers, weights):
        if w == 0.0:
            continue
        out.add_(layer(x), alpha=w)
    result = out.clone()
    pool.push_scratch(acc)
    return result


def first_active(layers: Sequence[DilatedAttention], x: Tensor, weights: Sequence[float]) -> Optional[Tensor]:
    tmp = layers[0].scratch.pop_scratch()  # leak: the return inside the loop passes the push by
    for layer, w in zip(layers, weights):
        if w > 0.0:
            y = layer(x)
            tmp[: y.numel()].copy_(y.reshape(-1))
            return tmp[: y.numel()].view_as(y) * w
    layers[0].scratch.push_scratch(tmp)
    return None
