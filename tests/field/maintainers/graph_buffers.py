"""CUDA-graph input buffers behind layers of wrappers."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch


class RawBuffers:
    def __init__(self) -> None:
        self._by_size: Dict[int, List[torch.Tensor]] = {}

    def fetch(self, size: int) -> torch.Tensor:
        bucket = self._by_size.get(size)
        if bucket:
            return bucket.pop()  # clean: goes out to the caller
        return torch.zeros(size)

    def stash(self, t: torch.Tensor) -> None:
        self._by_size.setdefault(t.numel(), []).append(t)


class Sized:
    """Rounds sizes up before it asks the raw pool."""

    def __init__(self, raw: RawBuffers, multiple: int = 64):
        self.raw = raw
        self.multiple = multiple

    def fetch(self, n: int) -> torch.Tensor:
        size = -(-n // self.multiple) * self.multiple
        return self.raw.fetch(size)  # clean: returned to the caller

    def stash(self, t: torch.Tensor) -> None:
        self.raw.stash(t)


class Counted:
    """Limits how many buffers are out."""

    def __init__(self, inner: Sized, limit: int):
        self.inner = inner
        self.limit = limit
        self.out = 0

    def fetch(self, n: int) -> Optional[torch.Tensor]:
        if self.out >= self.limit:
            return None
        t = self.inner.fetch(n)  # clean: near miss, None comes only before it; the caller gets the buffer
        self.out += 1
        return t

    def fetch_filled(self, n: int, value: float) -> Optional[torch.Tensor]:
        t = self.inner.fetch(n)  # leak: at the limit None is returned after the buffer has been fetched
        if self.out >= self.limit:
            return None
        self.out += 1
        t.fill_(value)
        return t

    def stash(self, t: torch.Tensor) -> None:
        self.out -= 1
        self.inner.stash(t)


class Handle:
    def __init__(self, owner: Counted, tensor: torch.Tensor):
        self.owner = owner
        self.tensor: Optional[torch.Tensor] = tensor

    def close(self) -> None:
        if self.tensor is not None:
            self.owner.stash(self.tensor)
            self.tensor = None


class GraphRunner:
    def __init__(self, bufs: Counted):
        self.bufs = bufs
        self.inputs: Dict[str, Handle] = {}
        self.on_done: List[Callable[[], Any]] = []

    def handle(self, n: int) -> Optional[Handle]:
        t = self.bufs.fetch(n)  # clean: wrapped in a Handle that the caller closes
        if t is None:
            return None
        return Handle(self.bufs, t)

    def bind(self, name: str, src: torch.Tensor) -> bool:
        h = self.handle(src.numel())  # clean: near miss, the handle it replaces is closed, unbind closes this one
        if h is None:
            return False
        prev = self.inputs.get(name)
        if prev is not None:
            prev.close()
        h.tensor[: src.numel()].copy_(src.flatten())
        self.inputs[name] = h
        return True

    def bind_default(self, name: str, n: int) -> bool:
        h = self.handle(n)  # leak: if the name is bound already the new handle is dropped unclosed
        if h is None:
            return False
        if name in self.inputs:
            return True
        self.inputs[name] = h
        return True

    def unbind(self, name: str) -> None:
        h = self.inputs.pop(name, None)
        if h is not None:
            h.close()

    def replay(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        h = self.handle(x.numel())  # leak: the return for an empty input comes before close
        if h is None:
            return None
        h.tensor[: x.numel()].copy_(x.flatten())
        out = h.tensor[: x.numel()].clone()
        if out.numel() == 0:
            return None
        h.close()
        return out.view_as(x)

    def replay_async(self, x: torch.Tensor) -> bool:
        h = self.handle(x.numel())  # clean: near miss, its close is registered in on_done, which drain runs
        if h is None:
            return False
        h.tensor[: x.numel()].copy_(x.flatten())
        self.on_done.append(h.close)
        return True

    def drain(self) -> None:
        while self.on_done:
            self.on_done.pop()()

    def _mask(self, n: int) -> Optional[torch.Tensor]:
        m = self.bufs.fetch_filled(n, 1.0)  # clean: passed up, the callers stash it
        return m

    def masked_sum(self, x: torch.Tensor) -> float:
        mask = self._mask(x.numel())  # leak: only the number is returned, the mask is never stashed
        if mask is None:
            return float(x.sum())
        return float((mask[: x.numel()] * x.flatten()).sum())

    def masked_mean(self, x: torch.Tensor) -> float:
        mask = self._mask(x.numel())  # clean: stashed once it is used
        if mask is None:
            return float(x.mean())
        value = float((mask[: x.numel()] * x.flatten()).mean())
        self.bufs.stash(mask)
        return value

    def capture(self, sizes: List[int]) -> int:
        n_ok = 0
        for n in sizes:
            h = self.handle(n)  # leak: for odd sizes the else branch is missing and the handle is not closed
            if h is None:
                break
            n_ok += 1
            if n % 2 == 0:
                h.close()
        return n_ok

    def shutdown(self) -> None:
        self.drain()
        for name in list(self.inputs):
            self.unbind(name)
