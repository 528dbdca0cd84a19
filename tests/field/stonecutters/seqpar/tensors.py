"""Exchange tensors cached by shape, with a bound on those outside."""
from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager
from typing import DefaultDict, Iterator, List, Optional, Tuple

import torch


class ExchangeTensors:
    def __init__(self, device, max_outside: int = 48):
        self.device = device
        self.max_outside = max_outside
        self.outside: Counter = Counter()
        self._home: DefaultDict[Tuple, List[torch.Tensor]] = defaultdict(list)

    def summon(self, shape, dtype) -> Optional[torch.Tensor]:
        key = (tuple(shape), dtype)
        if sum(self.outside.values()) >= self.max_outside:
            return None
        self.outside[key] += 1
        if self._home[key]:
            return self._home[key].pop()
        return torch.empty(shape, dtype=dtype, device=self.device)

    def dismiss(self, t: torch.Tensor) -> None:
        key = (tuple(t.shape), t.dtype)
        self.outside[key] -= 1
        self._home[key].append(t)

    def summon_like(self, t: torch.Tensor, contiguous_only: bool = False) -> Optional[torch.Tensor]:
        fresh = self.summon(t.shape, t.dtype)  # leak: a strided source is refused after the summon
        if fresh is None:
            return None
        if contiguous_only and not t.is_contiguous():
            return None
        return fresh

    @contextmanager
    def loan(self, shape, dtype) -> Iterator[Optional[torch.Tensor]]:
        t = self.summon(shape, dtype)  # clean: dismissed in finally
        try:
            yield t
        finally:
            if t is not None:
                self.dismiss(t)
