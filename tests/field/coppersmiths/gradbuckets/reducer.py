from typing import Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist

from .bucket import Bucket, Bucketer
from .slab import CountedPool


class Reducer:
    def __init__(self, pool: CountedPool, compress: bool = False):
        self.pool = pool
        self.compress = compress
        self.bucketer = Bucketer(pool)
        self.flying: List[Tuple[dist.Work, torch.Tensor]] = []

    def _flatten(self, grads: Iterable[torch.Tensor]) -> Optional[torch.Tensor]:
        flat = self.pool.slab()  # clean: returned to the caller
        if flat is None:
            return None
        off = 0
        for g in grads:
            flat[off:off + g.numel()].copy_(g.flatten())
            off += g.numel()
        return flat

    def launch(self, grads: List[torch.Tensor]) -> bool:
        flat = self._flatten(grads)  # clean: kept in flying until wait_all()
        if flat is None:
            return False
        self.flying.append((dist.all_reduce(flat, async_op=True), flat))
        return True

    def wait_all(self) -> None:
        while self.flying:
            work, flat = self.flying.pop()
            work.wait()
            self.pool.stow(flat)

    def wait_first(self) -> Optional[torch.Tensor]:
        if not self.flying:
            return None
        work, flat = self.flying.pop(0)  # leak: result is cloned and the slab dropped
        work.wait()
        return flat.clone()

    def mean(self, grads: List[torch.Tensor], world: int) -> Optional[torch.Tensor]:
        flat = self._flatten(grads)  # leak: division makes a new tensor and the slab's name is rebound
        if flat is None:
            return None
        dist.all_reduce(flat)
        flat = flat / world
        return flat

    def mean_inplace(self, grads: List[torch.Tensor], world: int) -> bool:
        flat = self._flatten(grads)  # clean: near miss, divided in place and stowed
        if flat is None:
            return False
        dist.all_reduce(flat)
        flat /= world
        off = 0
        for g in grads:
            g.copy_(flat[off:off + g.numel()].view_as(g))
            off += g.numel()
        self.pool.stow(flat)
        return True

    def reduce_bucket(self, b: Bucket) -> None:
        half = None
        if self.compress:
            half = self.pool.slab()  # clean: stowed whenever it was got
        if half is not None:
            half[:b.used].copy_(b.flat[:b.used])
            dist.all_reduce(half[:b.used])
            b.flat[:b.used].copy_(half[:b.used])
            self.pool.stow(half)
        else:
            dist.all_reduce(b.flat[:b.used])

    def broadcast(self, grads: List[torch.Tensor], root: int) -> bool:
        with self.pool.using() as flat:  # clean: with statement
            if flat is None:
                return False
            for g in grads:
                flat[:g.numel()].copy_(g.flatten())
                dist.broadcast(flat[:g.numel()], root)
                g.copy_(flat[:g.numel()].view_as(g))
        return True
