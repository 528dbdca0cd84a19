from __future__ import annotations

from typing import Optional

import torch

from .memory import HostAllocator, MemoryObj
from .storage import LocalDiskBackend, LocalHostBackend


class HostCacheEngine:
    def __init__(self, allocator: HostAllocator, host: LocalHostBackend, disk: LocalDiskBackend) -> None:
        self.allocator = allocator
        self.host = host
        self.disk = disk
        self.lookup_pins: dict[str, list[MemoryObj]] = {}

    def store(self, key: str, kv: torch.Tensor) -> bool:
        if self.host.contains(key):
            return True
        obj = self.allocator.allocate()  # clean: near miss, the own reference goes down whether or not put took one
        if obj is None:
            return False
        obj.tensor.copy_(kv)
        stored = self.host.put(key, obj)  # clean: the backend owns its reference, none is taken on False
        obj.ref_count_down()
        return stored

    def store_layers(self, keys: list[str], layers: list[torch.Tensor]) -> int:
        objs = self.allocator.batched_allocate(len(keys))  # leak: the objects whose key is cached already are skipped without ref_count_down
        if objs is None:
            return 0
        stored = 0
        for key, obj, layer in zip(keys, objs, layers):
            if self.host.contains(key):
                continue
            obj.tensor.copy_(layer)
            self.host.put(key, obj)  # clean: the backend owns its reference
            obj.ref_count_down()
            stored += 1
        return stored

    def refresh(self, key: str, kv: torch.Tensor) -> bool:
        obj = self.allocator.allocate()  # clean: near miss, the own reference goes down after replace took its own
        if obj is None:
            return False
        obj.tensor.copy_(kv)
        self.host.replace(key, obj)  # leak: an entry under the same key is lost in the backend
        obj.ref_count_down()
        return True

    def retrieve(self, key: str, out: torch.Tensor) -> bool:
        obj = self.host.get(key) or self.disk.load(key)  # clean: near miss, one of the two and it goes down after the copy
        if obj is None:
            return False
        out.copy_(obj.tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        obj.ref_count_down()
        return True

    def lookup(self, request_id: str, keys: list[str]) -> int:
        pinned = self.lookup_pins.setdefault(request_id, [])
        hits = 0
        for key in keys:
            obj = self.host.get(key)  # clean: near miss, joined to the list of the request, which unpin lowers
            if obj is None:
                break
            pinned.append(obj)
            hits += 1
        return hits

    def unpin(self, request_id: str) -> None:
        for obj in self.lookup_pins.pop(request_id, []):
            obj.ref_count_down()

    def prefetch(self, keys: list[str]) -> int:
        loaded = 0
        for key in keys:
            obj = self.disk.load(key)  # leak: the loader's own reference stays after put took another
            if obj is None:
                continue
            self.host.put(key, obj)  # clean: the backend owns its reference
            loaded += 1
        return loaded

    def checksum(self, key: str) -> Optional[float]:
        obj = self.host.get(key)  # clean: near miss, goes down before either return
        if obj is None:
            return None
        total = float(obj.tensor.sum())
        obj.ref_count_down()
        if total != total:
            return None
        return total
