"""Connector used by the engine: store, load, migrate."""
from __future__ import annotations

import logging
from typing import List, Optional, Sequence

import torch

from .placement import Placement, PlacementTable, place
from .tiers import DiskTier, TensorTier, Tier

logger = logging.getLogger(__name__)


class OffloadConnector:
    def __init__(self, host: TensorTier, disk: DiskTier, write_through: bool = False) -> None:
        self.host = host
        self.disk = disk
        self.write_through = write_through
        self.table = PlacementTable()
        self.shadow: Optional[Placement] = None

    @property
    def tiers(self) -> List[Tier]:
        return [self.host, self.disk]

    def store(self, key: str, pages: Sequence[torch.Tensor]) -> bool:
        p = place(self.tiers, len(pages))  # clean: goes into the table, which drops it
        if p is None:
            return False
        for chunk, page in zip(p.chunks, pages):
            p.tier.write(chunk, page)
        self.table.put(key, p)
        return True

    def store_if_finite(self, key: str, pages: Sequence[torch.Tensor]) -> bool:
        p = place(self.tiers, len(pages))  # leak: a page with inf or nan ends the store without dropping the placement
        if p is None:
            return False
        for chunk, page in zip(p.chunks, pages):
            if not bool(torch.isfinite(page).all()):
                logger.error("%s holds non-finite values, not stored", key)
                return False
            p.tier.write(chunk, page)
        self.table.put(key, p)
        return True

    def store_shadow(self, pages: Sequence[torch.Tensor]) -> None:
        if self.shadow is not None:
            self.shadow.drop()
        self.shadow = place(self.tiers, len(pages))  # clean: near miss, the former shadow was dropped, close() drops this one
        if self.shadow is not None:
            for chunk, page in zip(self.shadow.chunks, pages):
                self.shadow.tier.write(chunk, page)

    def load(self, key: str, out: torch.Tensor) -> bool:
        p = self.table.peek(key)
        if p is None:
            return False
        for row, chunk in zip(out, p.chunks):
            row.copy_(p.tier.read(chunk))
        return True

    def load_and_forget(self, key: str, out: torch.Tensor) -> bool:
        p = self.table.take(key)  # clean: near miss, dropped after the copy
        if p is None:
            return False
        for row, chunk in zip(out, p.chunks):
            row.copy_(p.tier.read(chunk))
        p.drop()
        return True

    def evict(self, key: str) -> int:
        p = self.table.take(key)  # leak: the row is taken out for its size only, its chunks stay allocated
        return 0 if p is None else len(p.chunks)

    def demote(self, key: str) -> bool:
        """host -> disk"""
        p = self.table.take(key)  # leak: with a full disk the placement is in no table any more
        if p is None or p.tier is self.disk:
            if p is not None:
                self.table.put(key, p)
            return False
        target = self.disk.allocate(len(p.chunks))  # clean: near miss, None holds nothing, otherwise in the table
        if target is None:
            return False
        for src, dst in zip(p.chunks, target):
            self.disk.write(dst, p.tier.read(src))
        p.drop()
        self.table.put(key, Placement(self.disk, target))
        return True

    def promote(self, key: str) -> bool:
        """disk -> host"""
        p = self.table.peek(key)
        if p is None or p.tier is self.host:
            return False
        target = self.host.allocate(len(p.chunks))  # clean: near miss, put() drops the old placement and keeps the new one
        if target is None:
            return False
        for src, dst in zip(p.chunks, target):
            self.host.write(dst, p.tier.read(src))
        self.table.put(key, Placement(self.host, target))
        return True

    def mirror(self, key: str) -> bool:
        p = self.table.peek(key)
        if p is None or not self.write_through:
            return False
        copy = self.disk.allocate(len(p.chunks))  # leak: a page already on disk returns True and the fresh chunks are forgotten
        if copy is None:
            return False
        if p.tier is self.disk:
            return True
        for src, dst in zip(p.chunks, copy):
            self.disk.write(dst, p.tier.read(src))
        self.table.put(key + "@disk", Placement(self.disk, copy))
        return True

    def room(self, n: int) -> bool:
        probe = self.host.allocate_one_by_one(n)  # clean: freed at once if there was one
        if probe is None:
            return False
        self.host.free(probe)
        return True

    def close(self) -> None:
        if self.shadow is not None:
            self.shadow.drop()
            self.shadow = None
        self.table.clear()
        self.disk.close()
