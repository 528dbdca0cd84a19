"""Scratch tensors for kernels, cached by shape and dtype."""
from __future__ import annotations

import math
from collections import defaultdict
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F

Key = Tuple[Tuple[int, ...], torch.dtype]


class TensorCache:
    """Free tensors by (shape, dtype). rent() pops one, put_away() puts it back."""

    def __init__(self, device: str = "cpu", max_bytes: int = 1 << 30):
        self.device = device
        self.max_bytes = max_bytes
        self.bytes_out = 0
        self._shelves: Dict[Key, List[torch.Tensor]] = defaultdict(list)

    def rent(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shelf = self._shelves[(shape, dtype)]
        t = shelf.pop() if shelf else torch.empty(shape, dtype=dtype, device=self.device)
        self.bytes_out += t.numel() * t.element_size()
        return t

    def rent_if_room(self, *shape: int, dtype: torch.dtype = torch.float32) -> Optional[torch.Tensor]:
        t = self.rent(*shape, dtype=dtype)  # leak: over the limit the tensor is neither returned nor put away
        if self.bytes_out > self.max_bytes:
            return None
        return t

    def rent_zeroed(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.rent(*shape, dtype=dtype).zero_()  # clean: near miss, zero_() gives back the same tensor

    def rent_padded(self, rows: int, cols: int, multiple: int = 8) -> torch.Tensor:
        full = math.ceil(rows / multiple) * multiple
        t = self.rent(full, cols)  # clean: returned whole, the caller narrows it
        t[rows:].zero_()
        return t

    def put_away(self, t: torch.Tensor) -> None:
        self.bytes_out -= t.numel() * t.element_size()
        self._shelves[(tuple(t.shape), t.dtype)].append(t)


class Scratch:
    """with Scratch(cache, ...) as t: ..."""

    def __init__(self, cache: TensorCache, *shape: int, keep: bool = False):
        self.cache = cache
        self.shape = shape
        self.keep = keep
        self.t: Optional[torch.Tensor] = None

    def __enter__(self) -> torch.Tensor:
        self.t = self.cache.rent(*self.shape)  # clean: put away in __exit__, or taken with detach()
        return self.t

    def detach(self) -> torch.Tensor:
        t, self.t = self.t, None
        return t

    def __exit__(self, et, ev, tb) -> bool:
        if self.t is not None:
            self.cache.put_away(self.t)
            self.t = None
        return False


class QuietScratch:
    """Like Scratch, but a shape mismatch in the body is swallowed."""

    def __init__(self, cache: TensorCache, *shape: int):
        self.cache = cache
        self.shape = shape

    def __enter__(self) -> torch.Tensor:
        self.t = self.cache.rent(*self.shape)  # leak: __exit__ returns early on a swallowed RuntimeError
        return self.t

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, RuntimeError):
            return True
        self.cache.put_away(self.t)
        return False


class MoELayer:
    def __init__(self, cache: TensorCache, experts: int, hidden: int, inter: int):
        self.cache = cache
        self.experts = experts
        self.hidden = hidden
        self.w1 = torch.randn(experts, inter, hidden)
        self.w2 = torch.randn(experts, hidden, inter)
        self.shared_out: Optional[torch.Tensor] = None

    def _permuted(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        out = self.cache.rent(order.numel(), self.hidden)  # clean: returned to the caller
        torch.index_select(x, 0, order, out=out)
        return out

    def forward(self, x: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(expert_of)
        px = self._permuted(x, order)  # clean: put away before the return
        acc = self.cache.rent_zeroed(*x.shape)  # clean: copied out, then put away
        counts = torch.bincount(expert_of, minlength=self.experts).tolist()
        start = 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            h = F.silu(px[start:start + n] @ self.w1[e].t())
            acc[order[start:start + n]] = h @ self.w2[e].t()
            start += n
        out = acc.clone()
        self.cache.put_away(px)
        self.cache.put_away(acc)
        return out

    def route_debug(self, x: torch.Tensor, expert_of: torch.Tensor) -> List[float]:
        order = torch.argsort(expert_of)
        return self._permuted(x, order).norm(dim=-1).tolist()  # leak: the permuted tensor is a temporary nobody puts away

    def expert_input(self, x: torch.Tensor, order: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        px = self._permuted(x, order)  # leak: a copy of the slice is returned, the pooled tensor is dropped
        return px[lo:hi].clone()

    def set_shared(self, x: torch.Tensor) -> None:
        fresh = self.cache.rent(*x.shape)  # clean: near miss, replaces self.shared_out, whose old tensor is put away
        fresh.copy_(x)
        if self.shared_out is not None:
            self.cache.put_away(self.shared_out)
        self.shared_out = fresh

    def drop_shared(self) -> None:
        if self.shared_out is not None:
            self.cache.put_away(self.shared_out)
            self.shared_out = None


class Attention:
    def __init__(self, cache: TensorCache, heads: int, dim: int):
        self.cache = cache
        self.heads = heads
        self.dim = dim

    def scores(self, q: torch.Tensor, k: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        s = self.cache.rent(q.shape[0], k.shape[0])  # clean: returned to the caller
        torch.matmul(q, k.t(), out=s)
        if mask is not None:
            s.masked_fill_(mask, float("-inf"))
        return s

    def forward(self, q, k, v, mask=None, tmp: Optional[torch.Tensor] = None) -> torch.Tensor:
        own = tmp is None
        if own:
            tmp = self.cache.rent(q.shape[0], v.shape[1])  # clean: near miss, put away when own
        s = self.scores(q, k, mask)  # clean: put away after the product
        torch.matmul(torch.softmax(s, -1), v, out=tmp)
        self.cache.put_away(s)
        res = tmp.clone()
        if own:
            self.cache.put_away(tmp)
        return res

    def entropy(self, q, k) -> float:
        s = self.scores(q, k, None)  # leak: rebound to its softmax, the pooled tensor is out of reach
        s = torch.softmax(s, -1)
        ent = -(s * (s + 1e-9).log()).sum(-1).mean().item()
        return ent

    def topk_scores(self, q, k, n: int) -> Tuple[torch.Tensor, torch.Tensor]:
        sc = Scratch(self.cache, q.shape[0], k.shape[0])
        with sc as s:
            torch.matmul(q, k.t(), out=s)
            raw = sc.detach()
        top = raw.topk(n, -1)
        self.cache.put_away(raw)
        return top.values, top.indices

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        rot = self.cache.rent(*x.shape)  # leak: not put away when all sines are zero
        rot[..., :half] = -x[..., half:]
        rot[..., half:] = x[..., :half]
        if sin.abs().max() == 0:
            return x * cos
        out = x * cos + rot * sin
        self.cache.put_away(rot)
        return out
