from typing import Dict, List, Optional, Union

import torch

from .slab import CountedPool, SlabPool

Pool = Union[SlabPool, CountedPool]


class Bucket:
    def __init__(self, index: int, flat: torch.Tensor):
        self.index = index
        self.flat = flat
        self.used = 0

    def push(self, g: torch.Tensor) -> bool:
        n = g.numel()
        if self.used + n > self.flat.numel():
            return False
        self.flat[self.used:self.used + n].copy_(g.flatten())
        self.used += n
        return True


class Bucketer:
    def __init__(self, pool: Pool):
        self.pool = pool
        self.open: Optional[Bucket] = None
        self.extra: Optional[Bucket] = None
        self.full: List[Bucket] = []
        self.side: Dict[int, torch.Tensor] = {}

    def start(self) -> bool:
        flat = self.pool.slab()  # clean: near miss, wrapped in self.open, which start() and seal() pass to full and drop_all() stows
        if flat is None:
            return False
        if self.open is not None:
            self.full.append(self.open)
        self.open = Bucket(len(self.full), flat)
        return True

    def start_extra(self) -> bool:
        flat = self.pool.slab()  # leak: the extra bucket of an earlier call is replaced and its slab lost
        if flat is None:
            return False
        self.extra = Bucket(0, flat)
        return True

    def seal(self) -> None:
        if self.open is not None:
            self.full.append(self.open)
            self.open = None

    def drop_all(self) -> None:
        self.seal()
        while self.full:
            self.pool.stow(self.full.pop().flat)
        if self.extra is not None:
            self.pool.stow(self.extra.flat)
            self.extra = None

    def norm(self, grads: List[torch.Tensor]) -> Optional[float]:
        flat = self.pool.slab()  # leak: gradients that do not fit return None before stow
        if flat is None:
            return None
        off = 0
        for g in grads:
            if off + g.numel() > flat.numel():
                return None
            flat[off:off + g.numel()].copy_(g.flatten())
            off += g.numel()
        v = flat[:off].norm().item()
        self.pool.stow(flat)
        return v

    def residual(self, key: int) -> Optional[torch.Tensor]:
        r = self.side.get(key)
        if r is None:
            r = self.pool.slab()  # clean: kept in side until clear_residuals()
            if r is None:
                return None
            r.zero_()
            self.side[key] = r
        return r

    def clear_residuals(self) -> None:
        for k in list(self.side):
            self.pool.stow(self.side.pop(k))
