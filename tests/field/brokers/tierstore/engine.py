from __future__ import annotations

import asyncio
import logging

import torch

from .arena import Arena, MemoryObj
from .index import LocalIndex
from .remote import RemoteTier

logger = logging.getLogger(__name__)


class CacheEngine:
    def __init__(self, arena: Arena, index: LocalIndex, remote: RemoteTier) -> None:
        self.arena = arena
        self.index = index
        self.remote = remote
        self.to_push: dict[str, MemoryObj] = {}

    def store(self, key: str, data: torch.Tensor) -> bool:
        obj = self.arena.allocate()  # leak: insert refuses a known key and the fresh page is dropped with it
        if obj is None:
            self.index.evict(1)
            return False
        obj.data[: data.numel()].copy_(data.flatten())
        return self.index.insert(key, obj)

    def store_many(self, items: dict[str, torch.Tensor]) -> int:
        objs = self.arena.allocate_upto(len(items))  # clean: near miss, each page is inserted or its reference goes down
        kept = 0
        for (key, data), obj in zip(items.items(), objs):
            obj.data[: data.numel()].copy_(data.flatten())
            if not self.index.insert(key, obj):
                self.arena.ref_down(obj)
                continue
            kept += 1
        return kept

    def mark_for_push(self, key: str) -> bool:
        if key in self.to_push:
            return True
        obj = self.index.get(key)  # clean: near miss, to_push keeps the reference until flush drops it
        if obj is None:
            return False
        self.to_push[key] = obj
        return True

    async def flush(self) -> int:
        batch, self.to_push = self.to_push, {}
        try:
            return await self.remote.push_all(batch)
        finally:
            for obj in batch.values():
                self.arena.ref_down(obj)

    async def retrieve(self, key: str, out: torch.Tensor) -> bool:
        obj = self.index.get(key)  # clean: near miss, ref_down follows the copy
        if obj is None:
            obj = await self.remote.fetch(key)  # clean: near miss, replaces None only and shares the ref_down below
        if obj is None:
            return False
        out.copy_(obj.data[: out.numel()].view(out.shape))
        self.arena.ref_down(obj)
        return True

    async def prefetch(self, keys: list[str], timeout: float) -> int:
        got = 0
        for key in keys:
            if key in self.index:
                continue
            try:
                obj = await asyncio.wait_for(self.remote.fetch(key), timeout)  # clean: near miss, inserted or given down again
            except asyncio.TimeoutError:
                logger.info("prefetch of %s timed out", key)
                break
            if obj is None:
                continue
            if self.index.insert(key, obj):
                got += 1
            else:
                self.arena.ref_down(obj)
        return got

    def checksum(self, keys: list[str], at_least: int = 2) -> int:
        total = 0
        for obj in self.index.get_prefix(keys, at_least):  # clean: near miss, every element is given down in the loop
            total ^= int(obj.data.sum())
            self.arena.ref_down(obj)
        return total
