"""Batches assembled in pinned regions."""
from __future__ import annotations

from typing import Dict, Iterable, List, Optional

import torch

from .arena import Region
from .pool import HostPool, LeaseSet, hold


class BatchLoader:
    def __init__(self, pool: HostPool, device: str = "cuda") -> None:
        self.pool = pool
        self.device = device
        self.sticky: Dict[str, Region] = {}
        self.misses = 0

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        n = x.numel() * x.element_size()
        with hold(self.pool, n) as r:  # clean: the with statement cancels it
            if r is None:
                self.misses += 1
                return x.to(self.device)
            stage = self.pool.arena.tensor(r)
            stage.copy_(x.view(torch.uint8).view(-1))
            return stage.to(self.device).view(x.dtype).view(x.shape)

    def batch(self, xs: List[torch.Tensor]) -> Optional[List[torch.Tensor]]:
        outs = []
        with LeaseSet(self.pool) as regions:
            for x in xs:
                r = regions.add(x.numel())  # clean: the set ends with the with statement
                if r is None:
                    return None
                self.pool.arena.tensor(r).copy_(x)
                outs.append(self.pool.arena.tensor(r).to(self.device))
        return outs

    def concat(self, xs: Iterable[torch.Tensor], total: int) -> Optional[torch.Tensor]:
        r = self.pool.try_reserve(total)  # leak: not cancelled when the inputs are longer than announced
        if r is None:
            return None
        stage, used = self.pool.arena.tensor(r), 0
        for x in xs:
            if used + x.numel() > total:
                self.misses += 1
                return None
            stage[used:used + x.numel()].copy_(x)
            used += x.numel()
        out = stage[:used].to(self.device)
        self.pool.cancel(r)
        return out

    def pin(self, name: str, nbytes: int) -> bool:
        r = self.pool.reserve(nbytes)  # leak: pinning a name again overwrites its region
        if r is None:
            return False
        self.sticky[name] = r
        return True

    def unpin(self, name: str) -> None:
        r = self.sticky.pop(name, None)
        if r is not None:
            self.pool.cancel(r)

    def write_sticky(self, name: str, x: torch.Tensor) -> None:
        self.pool.arena.tensor(self.sticky[name])[:x.numel()].copy_(x)
