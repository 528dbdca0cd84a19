from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable

import torch

from .ipc import HandleRegistry
from .staging import StagingPool

log = logging.getLogger(__name__)


@dataclass
class Shard:
    name: str
    hid: int
    nbytes: int


class TrainerPush:
    def __init__(self, pool: StagingPool, registry: HandleRegistry, notify: Callable[[list[Shard]], bool]):
        self.pool = pool
        self.registry = registry
        self.notify = notify
        self.published: dict[str, Shard] = {}

    def _stage(self, p: torch.Tensor) -> torch.Tensor | None:
        raw = p.detach().contiguous().view(torch.uint8).flatten()
        buf = self.pool.borrow(raw.numel())  # clean: returned to the caller
        if buf is not None:
            buf[:raw.numel()].copy_(raw)
        return buf

    def push_one(self, name: str, p: torch.Tensor) -> bool:
        buf = self._stage(p)  # leak: the refused branch revokes the handle and leaves the buffer
        if buf is None:
            return False
        hid = self.registry.export(buf)  # clean: revoked on both ways
        if not self.notify([Shard(name, hid, p.nbytes)]):
            self.registry.revoke(hid)
            return False
        self.pool.bring_back(self.registry.revoke(hid))
        return True

    def push_all(self, params: dict[str, torch.Tensor]) -> bool:
        shards: list[Shard] = []
        try:
            for name, p in params.items():
                buf = self._stage(p)  # clean: near miss, reached through its handle and brought back in finally
                if buf is None:
                    return False
                hid = self.registry.export(buf)  # clean: in shards, finally revokes all of them
                shards.append(Shard(name, hid, p.nbytes))
            return self.notify(shards)
        finally:
            for s in shards:
                self.pool.bring_back(self.registry.revoke(s.hid))

    def publish(self, name: str, p: torch.Tensor) -> Shard | None:
        """Leave a shard up until withdraw()."""
        buf = self._stage(p)  # clean: near miss, the shard before is withdrawn and withdraw() brings this one back
        if buf is None:
            return None
        if name in self.published:
            self.withdraw(name)
        hid = self.registry.export(buf)  # clean: in self.published, withdraw() revokes it
        self.published[name] = Shard(name, hid, p.nbytes)
        return self.published[name]

    def withdraw(self, name: str) -> None:
        shard = self.published.pop(name)
        self.pool.bring_back(self.registry.revoke(shard.hid))

    def digest(self, params: dict[str, torch.Tensor]) -> dict[str, int]:
        sums = {}
        for name, p in params.items():
            buf = self._stage(p)  # leak: empty parameters are skipped with their buffer
            if buf is None:
                break
            if not p.numel():
                log.debug("%s is empty", name)
                continue
            sums[name] = int(buf[:p.nbytes].sum())
            self.pool.bring_back(buf)
        return sums
