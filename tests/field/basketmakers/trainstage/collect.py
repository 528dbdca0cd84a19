"""Gather of full parameters from shards."""
from __future__ import annotations

from typing import Optional

import torch
import torch.distributed as dist

from .codec import to_wire
from .staging import STAGE


class GatherHandle:
    """Owns the full tensor until free()."""

    def __init__(self, full: torch.Tensor, work) -> None:
        self.full: Optional[torch.Tensor] = full
        self.work = work

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.full

    def free(self) -> None:
        if self.full is not None:
            STAGE.rack(self.full)
            self.full = None


def gather_async(shard: torch.Tensor, world: int) -> GatherHandle:
    full = STAGE.pull((world * shard.numel(),), shard.dtype)  # clean: owned by the returned handle
    return GatherHandle(full, dist.all_gather_into_tensor(full, shard, async_op=True))


def gather_wire(shard: torch.Tensor, world: int, out: torch.Tensor) -> bool:
    wire = to_wire(shard)  # leak: not racked when the full tensor is over the limit
    full = STAGE.pull_capped((world * shard.numel(),), torch.bfloat16)  # clean: racked with wire after the copy
    if full is None:
        return False
    dist.all_gather_into_tensor(full, wire)
    out.copy_(full)
    STAGE.rack(full)
    STAGE.rack(wire)
    return True
