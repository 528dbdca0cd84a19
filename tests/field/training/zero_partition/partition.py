from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import List, Optional

import torch
import torch.distributed as dist

from .pool import GatherPool

logger = logging.getLogger(__name__)


@dataclass
class PartitionedParam:
    name: str
    shard: torch.Tensor
    full_shape: torch.Size
    gathered: Optional[torch.Tensor] = None
    shadow: Optional[torch.Tensor] = None
    persistent: bool = False

    @property
    def numel(self) -> int:
        return self.full_shape.numel()


class ParamCoordinator:
    def __init__(self, pool: GatherPool, params: List[PartitionedParam]) -> None:
        self.pool = pool
        self.params = params

    def gather(self, p: PartitionedParam) -> bool:
        if p.gathered is not None:
            return True
        buf = self.pool.fetch_fit(p.numel)  # clean: kept on the parameter until scatter()
        if buf is None:
            buf = self.pool.fetch(p.numel)  # clean: kept on the parameter until scatter()
        if buf is None:
            return False
        dist.all_gather_into_tensor(buf[: p.numel], p.shard)
        p.gathered = buf
        return True

    def scatter(self, p: PartitionedParam) -> None:
        if p.gathered is None or p.persistent:
            return
        self.pool.put_back(p.gathered)
        p.gathered = None

    def scatter_all(self) -> None:
        for p in self.params:
            if p.gathered is not None:
                self.pool.put_back(p.gathered)
                p.gathered = None
            if p.shadow is not None:
                self.pool.put_back(p.shadow)
                p.shadow = None

    def temp_full(self, p: PartitionedParam) -> Optional[torch.Tensor]:
        buf = self.pool.fetch(p.numel)  # clean: the caller puts it back
        if buf is None:
            return None
        dist.all_gather_into_tensor(buf[: p.numel], p.shard)
        return buf

    def norm(self, p: PartitionedParam) -> float:
        buf = self.temp_full(p)  # clean: put back before the return
        if buf is None:
            return 0.0
        value = float(buf[: p.numel].float().norm())
        self.pool.put_back(buf)
        return value

    def is_finite(self, p: PartitionedParam) -> bool:
        buf = self.temp_full(p)  # leak: put back only when the values are finite
        if buf is None:
            return True
        if not torch.isfinite(buf[: p.numel]).all():
            logger.error("%s is not finite", p.name)
            return False
        self.pool.put_back(buf)
        return True

    def refresh(self, p: PartitionedParam) -> None:
        fresh = self.pool.fetch(p.numel)  # leak: the shadow of the last refresh is overwritten
        if fresh is None:
            return
        dist.all_gather_into_tensor(fresh[: p.numel], p.shard)
        p.shadow = fresh

    def refresh_swap(self, p: PartitionedParam) -> None:
        fresh = self.pool.fetch(p.numel)  # clean: near miss, the old buffer goes back before the swap
        if fresh is None:
            return
        dist.all_gather_into_tensor(fresh[: p.numel], p.shard)
        old, p.gathered = p.gathered, fresh
        if old is not None:
            self.pool.put_back(old)

    def refresh_every(self, p: PartitionedParam, rounds: int) -> None:
        for _ in range(rounds):
            self.refresh(p)
            if p.shadow is not None:
                p.shard.copy_(p.shadow[: p.shard.numel()])
