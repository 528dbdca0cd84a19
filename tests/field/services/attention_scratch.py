import math
from contextlib import contextmanager
from typing import Dict, List, Optional, Tuple

import torch
from torch import nn


class Workspace:
    """Stack of flat scratch areas, one per nesting level."""

    def __init__(self, levels: int, numel: int):
        self._stack: List[torch.Tensor] = [torch.empty(numel) for _ in range(levels)]
        self.peak = 0

    def get(self) -> torch.Tensor:
        if not self._stack:
            raise RuntimeError("workspace exhausted")
        return self._stack.pop()  # clean: handed out

    def put(self, area: torch.Tensor) -> None:
        self._stack.append(area)

    def grow(self, numel: int) -> None:
        fresh: List[torch.Tensor] = []
        while self._stack:
            old = self._stack.pop()  # clean: near miss, replaced one for one by a bigger area or kept
            fresh.append(old if old.numel() >= numel else torch.empty(numel))
        self._stack = fresh

    def prune(self, numel: int) -> None:
        keep: List[torch.Tensor] = []
        for _ in range(len(self._stack)):
            area = self._stack.pop()  # leak: the area found too small ends the loop and, with those kept so far, is lost
            if area.numel() < numel:
                return
            keep.append(area)
        self._stack.extend(keep)

    @contextmanager
    def area(self):
        a = self.get()  # clean: put in finally
        try:
            yield a
        finally:
            self.put(a)


class ScratchAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ws: Optional[Workspace] = None):
        super().__init__()
        self.h = heads
        self.d = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ws = ws
        self._saved: Optional[torch.Tensor] = None

    def _scores(self, q: torch.Tensor, k: torch.Tensor, area: torch.Tensor) -> torch.Tensor:
        shape = (*q.shape[:-1], k.shape[-2])
        s = area[: math.prod(shape)].view(shape)
        torch.matmul(q, k.transpose(-1, -2), out=s)
        return s.div_(math.sqrt(self.d))

    def _split(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(x)
        if self.ws is not None:
            area = self.ws.get()  # clean: near miss, both blocks test the same field
        else:
            area = torch.empty(q.shape[0] * self.h * x.shape[1] ** 2)
        p = self._scores(q, k, area).softmax(-1)
        y = (p @ v).transpose(1, 2).reshape_as(x)
        if self.ws is not None:
            self.ws.put(area)
        return self.out(y)

    def forward_masked(self, x: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        assert self.ws is not None
        q, k, v = self._split(x)
        area = self.ws.get()  # leak: put back only when a mask was given
        s = self._scores(q, k, area)
        if mask is not None:
            s.masked_fill_(mask, float("-inf"))
            y = s.softmax(-1) @ v
            self.ws.put(area)
        else:
            y = s.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape_as(x))

    def entropy(self, x: torch.Tensor) -> torch.Tensor:
        assert self.ws is not None
        q, k, _ = self._split(x)
        with self.ws.area() as a:  # clean: with statement
            p = self._scores(q, k, a).softmax(-1)
            if p.isnan().any():
                return torch.zeros(())
            return -(p * p.log()).sum(-1).mean()

    def save_scores(self, x: torch.Tensor) -> None:
        assert self.ws is not None
        q, k, _ = self._split(x)
        if self._saved is not None:
            self.ws.put(self._saved)
        self._saved = self.ws.get()  # clean: near miss, the former one went back before; drop_scores() does the rest
        self._scores(q, k, self._saved)

    def drop_scores(self) -> None:
        if self._saved is not None and self.ws is not None:
            self.ws.put(self._saved)
        self._saved = None

    def two_pass(self, x: torch.Tensor) -> torch.Tensor:
        assert self.ws is not None
        a = self.ws.get()  # clean: put back in either branch
        b = self.ws.get()  # leak: the short-sequence branch puts back a alone
        q, k, v = self._split(x)
        s = self._scores(q, k, a)
        if x.shape[1] < 16:
            y = s.softmax(-1) @ v
            self.ws.put(a)
        else:
            t = self._scores(q, k, b)
            y = (s + t).softmax(-1) @ v
            self.ws.put(b)
            self.ws.put(a)
        return self.out(y.transpose(1, 2).reshape_as(x))


class CrossAttention(ScratchAttention):
    def kv_area(self, numel: int) -> torch.Tensor:
        assert self.ws is not None
        area = self.ws.get()  # clean: handed to the caller, the zeroing is in place
        area.zero_()
        return area

    def context_norm(self, ctx: torch.Tensor) -> float:
        area = self.kv_area(ctx.numel())  # leak: copied out of and dropped
        area[: ctx.numel()].copy_(ctx.reshape(-1))
        return area.norm().item()

    def context_max(self, ctx: torch.Tensor) -> float:
        area = self.kv_area(ctx.numel())  # clean: near miss, the view is rebound, the area itself goes back
        view = area[: ctx.numel()]
        view.copy_(ctx.reshape(-1))
        view = view.abs()
        top = view.max().item()
        self.ws.put(area)
        return top


def profile(layers: List[ScratchAttention], ws: Workspace, seq: int) -> Dict[int, int]:
    sizes: Dict[int, int] = {}
    for i, layer in enumerate(layers):
        area = ws.get()  # clean: put back at the end of each round
        need = layer.h * seq * seq
        sizes[i] = max(need - area.numel(), 0)
        ws.put(area)
    return sizes


def require(ws: Workspace, numel: int) -> bool:
    area = ws.get()  # leak: an area that is big enough is never put back
    if area.numel() >= numel:
        return True
    ws.put(area)
    return False
