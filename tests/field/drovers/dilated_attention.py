"""Dilated attention (LongNet style) with pooled segment workspaces, nn.Module-like layers and a borrowing mixin."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple


class Workspace:
    def __init__(self, numel: int):
        self.data = [0.0] * numel
        self.tag: Optional[str] = None


class WorkspaceCache:
    """Size-bucketed cache of workspaces; ``borrow`` grows it up to a byte limit."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._idle: Dict[int, List[Workspace]] = {}

    def borrow(self, numel: int) -> Optional[Workspace]:
        shelf = self._idle.setdefault(numel, [])
        if self.used + numel > self.limit:
            return None
        self.used += numel
        return shelf.pop() if shelf else Workspace(numel)

    def put_back(self, ws: Workspace) -> None:
        self.used -= len(ws.data)
        ws.tag = None
        self._idle.setdefault(len(ws.data), []).append(ws)

    def resize(self, ws: Workspace, numel: int) -> Optional[Workspace]:
        """Exchanges a workspace for a larger one, which the caller then owns instead."""
        bigger = self.borrow(numel)  # clean: near miss, returned; on failure the old one stays the caller's
        if bigger is None:
            return None
        bigger.data[:len(ws.data)] = ws.data
        self.put_back(ws)
        return bigger


class BorrowMixin:
    cache: WorkspaceCache
    name: str = "layer"

    def _borrow(self, numel: int) -> Optional[Workspace]:
        ws = self.cache.borrow(numel)  # clean: returned to the caller
        if ws is not None:
            ws.tag = self.name
        return ws

    def _return(self, *spaces: Optional[Workspace]) -> None:
        for ws in spaces:
            if ws is not None:
                self.cache.put_back(ws)

    def _borrow_pair(self, numel: int) -> Optional[Tuple[Workspace, Workspace]]:
        a = self._borrow(numel)  # clean: near miss, _return takes whichever was had
        b = self._borrow(numel)  # clean: near miss, as a
        if a is None or b is None:
            self._return(a, b)
            return None
        return a, b

    def _borrow_zeroed(self, numel: int) -> Optional[Workspace]:
        ws = self._borrow(numel)  # clean: returned to the caller
        if ws is None:
            return None
        ws.data[:] = [0.0] * numel
        return ws


class Module:
    training = True

    def __call__(self, *args: Any, **kw: Any) -> Any:
        return self.forward(*args, **kw)

    def forward(self, *args: Any, **kw: Any) -> Any:
        raise NotImplementedError


class DilatedSegment(BorrowMixin, Module):
    def __init__(self, cache: WorkspaceCache, segment: int, dilation: int):
        self.cache = cache
        self.segment = segment
        self.dilation = dilation
        self.name = f"seg{segment}x{dilation}"
        self._saved: Optional[Workspace] = None

    def forward(self, x: Sequence[float]) -> List[float]:
        n = len(x) // self.dilation
        ws = self._borrow_zeroed(n)  # leak: a sequence with no full segment returns the input and keeps it
        if ws is None:
            return list(x)
        if n < self.segment:
            return list(x)
        for i in range(n):
            ws.data[i] = x[i * self.dilation]
        out = [sum(ws.data[:i + 1]) / (i + 1) for i in range(n)]
        self._return(ws)
        return out

    def forward_saved(self, x: Sequence[float]) -> float:
        """Keeps the gathered segment for the backward pass in training."""
        ws = self._borrow(len(x))  # clean: near miss, kept for backward when training, else given back at once
        if ws is None:
            return sum(x)
        ws.data[:] = list(x)
        y = sum(ws.data)
        if self.training:
            self._return(self._saved)
            self._saved = ws
        else:
            self._return(ws)
        return y

    def backward(self, grad: float) -> List[float]:
        ws, self._saved = self._saved, None
        if ws is None:
            return []
        out = [grad * v for v in ws.data]
        self._return(ws)
        return out


class DilatedBlock(BorrowMixin, Module):
    """Several dilations over one sequence, mixed by their softmax denominators."""

    name = "block"

    def __init__(self, cache: WorkspaceCache, dilations: Sequence[int], heads: int = 1):
        self.cache = cache
        self.dilations = list(dilations)
        self.heads = heads
        self._rope: Optional[Workspace] = None
        self._mask: Optional[Workspace] = None

    def build_rope(self, length: int) -> None:
        if self._rope is not None and len(self._rope.data) >= length:
            return
        self._rope = self._borrow(length)  # leak: a longer sequence overwrites the table of the shorter one
        if self._rope is not None:
            self._rope.data[:] = [1.0 / (i + 1) for i in range(length)]

    def build_mask(self, length: int) -> None:
        if self._mask is not None and len(self._mask.data) >= length:
            return
        if self._mask is not None:
            self._return(self._mask)
        self._mask = self._borrow(length)  # clean: near miss, the old mask is given back first, close gives the last
        if self._mask is not None:
            self._mask.data[:] = [0.0] * length

    def close(self) -> None:
        self._return(self._rope, self._mask)
        self._rope = self._mask = None

    def forward(self, x: Sequence[float]) -> List[float]:
        pair = self._borrow_pair(len(x))  # clean: both given back at the end
        if pair is None:
            return list(x)
        num, den = pair
        num.data[:] = den.data[:] = [0.0] * len(x)
        for d in self.dilations:
            for i in range(0, len(x), d):
                num.data[i] += x[i]
                den.data[i] += 1.0
        out = [a / b if b else 0.0 for a, b in zip(num.data, den.data)]
        self._return(num, den)
        return out

    def forward_sum(self, x: Sequence[float]) -> List[float]:
        pair = self._borrow_pair(len(x))  # leak: only the accumulator is returned, the second of the pair is not
        if pair is None:
            return list(x)
        acc, tmp = pair
        acc.data[:] = [0.0] * len(x)
        for d in self.dilations:
            tmp.data[:] = [v if i % d == 0 else 0.0 for i, v in enumerate(x)]
            acc.data[:] = [a + b for a, b in zip(acc.data, tmp.data)]
        out = list(acc.data)
        self._return(acc)
        return out

    def forward_grow(self, x: Sequence[float], steps: int) -> Optional[int]:
        ws = self._borrow(len(x))  # leak: when the resize fails the old workspace is overwritten by None
        for _ in range(steps):
            if ws is None:
                return None
            ws = self.cache.resize(ws, len(ws.data) * 2)  # leak: the same one round later, the grown one is lost to None
        if ws is None:
            return None
        size = len(ws.data)
        self._return(ws)
        return size
