"""Moves parameter shards between the device and arena blocks."""
from __future__ import annotations

import logging
from typing import Dict, Optional

import torch

from .pool import Block, BlockArena, TransferPermits

log = logging.getLogger(__name__)


class ParamSwapper:
    def __init__(self, arena: BlockArena, permits: TransferPermits):
        self.arena = arena
        self.permits = permits
        self.host: Dict[int, Block] = {}
        self.readonly = False

    def stage_out(self, pid: int, shard: torch.Tensor) -> bool:
        way = self.permits.enter("h")  # leak: the full arena returns False inside the permit
        self.evict(pid)
        block = self.arena.allot(shard.numel())  # clean: near miss, the older block was evicted, this one waits in self.host
        if block is None:
            return False
        block.data[: shard.numel()].copy_(shard.flatten())
        self.host[pid] = block
        self.permits.leave(way)
        return True

    def stage_in(self, pid: int, into: torch.Tensor) -> bool:
        block = self.host.get(pid)
        if block is None:
            return False
        way = self.permits.enter("d")  # clean: left in finally
        try:
            into.copy_(block.data[: into.numel()].view_as(into))
        finally:
            self.permits.leave(way)
        return True

    def evict(self, pid: int) -> None:
        block = self.host.pop(pid, None)
        if block is not None:
            self.arena.regain(block)

    def evict_all(self) -> None:
        for pid in list(self.host):
            self.evict(pid)

    def detached_copy(self, pid: int) -> Optional[Block]:
        """A private copy of a staged shard; the caller regains it."""
        src = self.host.get(pid)
        if src is None:
            return None
        block = self.arena.allot(src.data.numel())  # clean: handed to the caller
        if block is None:
            return None
        block.data[: src.data.numel()].copy_(src.data)
        return block
