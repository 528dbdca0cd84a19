from __future__ import annotations

import threading

import torch

from .ipc import HandleRegistry
from .staging import StagingPool
from .trainer_side import Shard


class SamplerLoader:
    """Copies shards into the sampler's model between two decode steps."""

    def __init__(self, registry: HandleRegistry, pool: StagingPool, model: torch.nn.Module):
        self.registry = registry
        self.pool = pool
        self.params = dict(model.named_parameters())
        self.decode_lock = threading.Lock()

    def load(self, shard: Shard) -> bool:
        view = self.registry.map(shard.hid)  # leak: not unmapped when the sizes differ
        p = self.params[shard.name]
        if p.nbytes != shard.nbytes:
            return False
        p.data.view(torch.uint8).view(-1).copy_(view[:shard.nbytes])
        self.registry.unmap(shard.hid)
        return True

    def load_all(self, shards: list[Shard]) -> int:
        n = 0
        self.decode_lock.acquire()  # clean: released in finally
        try:
            for shard in shards:
                if shard.name not in self.params:
                    continue
                with self.registry.mapped(shard.hid) as view:  # clean: the context manager unmaps
                    p = self.params[shard.name]
                    p.data.view(torch.uint8).view(-1).copy_(view[:p.nbytes])
                n += 1
        finally:
            self.decode_lock.release()
        return n

    def try_load(self, shards: list[Shard], wait: float) -> int | None:
        if not self.decode_lock.acquire(timeout=wait):  # leak: an empty list returns under the lock
            return None
        if not shards:
            return 0
        try:
            return sum(self.load(s) for s in shards)
        finally:
            self.decode_lock.release()

    def checksum(self, shard: Shard, work: torch.Tensor | None = None) -> int | None:
        own = work is None
        if own:
            work = self.pool.borrow(shard.nbytes)  # clean: near miss, brought back under the same flag
            if work is None:
                return None
        with self.registry.mapped(shard.hid) as view:  # clean: the context manager unmaps
            work[:shard.nbytes].copy_(view[:shard.nbytes])
        total = int(work[:shard.nbytes].sum())
        if own:
            self.pool.bring_back(work)
        return total
