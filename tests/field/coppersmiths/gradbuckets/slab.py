from contextlib import contextmanager
from typing import Iterator, List, Optional

import torch


class SlabPool:
    def __init__(self, numel: int, count: int, device: torch.device):
        self.numel = numel
        self._stack: List[torch.Tensor] = [torch.empty(numel, device=device) for _ in range(count)]

    def slab(self) -> Optional[torch.Tensor]:
        return self._stack.pop() if self._stack else None

    def stow(self, t: torch.Tensor) -> None:
        self._stack.append(t)

    def slab_finite(self) -> Optional[torch.Tensor]:
        t = self.slab()  # clean: near miss, a poisoned slab is zeroed, not dropped
        if t is None:
            return None
        if not torch.isfinite(t).all():
            t.zero_()
        return t


class CountedPool:
    """Adds a byte quota per owner on top of a SlabPool."""

    def __init__(self, inner: SlabPool, quota: int):
        self.inner = inner
        self.quota = quota
        self.held = 0

    def slab(self) -> Optional[torch.Tensor]:
        t = self.inner.slab()  # leak: over quota returns None after the inner slab was taken
        if t is None:
            return None
        if self.held + t.nbytes > self.quota:
            return None
        self.held += t.nbytes
        return t

    def stow(self, t: torch.Tensor) -> None:
        self.held -= t.nbytes
        self.inner.stow(t)

    @contextmanager
    def using(self) -> Iterator[Optional[torch.Tensor]]:
        t = self.slab()  # clean: stowed in finally when there is one
        try:
            yield t
        finally:
            if t is not None:
                self.stow(t)
