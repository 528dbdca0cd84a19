from __future__ import annotations

import torch

from .objects import MemoryObj, PagedAllocator
from .tiers import DiskTier, HostTier


class CacheEngine:
    def __init__(self, alloc: PagedAllocator, host: HostTier, disk: DiskTier) -> None:
        self.alloc = alloc
        self.host = host
        self.disk = disk
        self.inflight: dict[str, list[MemoryObj]] = {}

    def lookup(self, key: str) -> MemoryObj | None:
        obj = self.host.get(key)  # clean: the reference is returned
        if obj is not None:
            return obj
        obj = self.disk.load(key)  # clean: near miss, rebinds a None; the host tier takes its own reference and this one is returned
        if obj is not None:
            self.host.put(key, obj)
        return obj

    def store(self, key: str, data: torch.Tensor) -> bool:
        obj = self.alloc.allocate(data.numel())  # clean: near miss, the table has its own reference and this one is taken down
        if obj is None:
            return False
        obj.tensor.copy_(data)
        self.host.put(key, obj)
        self.disk.save(key, obj)
        obj.ref_down()
        return True

    def update(self, key: str, data: torch.Tensor) -> bool:
        obj = self.alloc.allocate(data.numel())  # clean: taken down after the refresh
        if obj is None:
            return False
        obj.tensor.copy_(data)
        self.host.refresh(key, obj)
        obj.ref_down()
        return True

    def retrieve(self, keys: list[str], out: torch.Tensor) -> int:
        """Copies the longest prefix of hits into out."""
        offset = 0
        for key in keys:
            obj = self.lookup(key)  # leak: when out is full the break comes before the ref_down
            if obj is None:
                break
            if offset + obj.size > out.numel():
                break
            out[offset : offset + obj.size].copy_(obj.tensor)
            offset += obj.size
            obj.ref_down()
        return offset

    def prefetch(self, rid: str, keys: list[str]) -> int:
        objs: list[MemoryObj] = []
        for key in keys:
            obj = self.lookup(key)  # clean: near miss, the list is parked under rid and its references are taken down by release()
            if obj is None:
                break
            objs.append(obj)
        self.inflight.setdefault(rid, []).extend(objs)
        return len(objs)

    def release(self, rid: str) -> None:
        for obj in self.inflight.pop(rid, ()):
            obj.ref_down()

    def hit_tokens(self, keys: list[str], per_chunk: int) -> int:
        n = 0
        for key in keys:
            if self.lookup(key) is None:  # leak: the referenced object is only compared with None
                break
            n += per_chunk
        return n

    def close(self) -> None:
        for rid in list(self.inflight):
            self.release(rid)
        self.host.clear()
