from __future__ import annotations

from typing import Optional, Sequence

import torch

from .backends import DiskBackend, HostBackend
from .memory import MemoryAllocator, MemoryObj


class CacheEngine:
    def __init__(self, allocator: MemoryAllocator, host: HostBackend, disk: DiskBackend) -> None:
        self.allocator = allocator
        self.host = host
        self.disk = disk
        self._lookups: dict[str, list[MemoryObj]] = {}

    def store(self, key: str, kv: torch.Tensor) -> bool:
        raw = kv.contiguous().view(-1).view(torch.uint8)
        obj = self.allocator.allocate(raw.numel())  # leak: a key stored already returns before the engine's own reference falls
        if obj is None:
            return False
        obj.tensor[: obj.valid].copy_(raw)
        if not self.host.put(key, obj):
            return False
        self.disk.write(key, obj)
        obj.ref_count_down()
        return True

    def store_layers(self, prefix: str, layers: Sequence[torch.Tensor]) -> int:
        stored = 0
        for i, kv in enumerate(layers):
            raw = kv.contiguous().view(-1).view(torch.uint8)
            obj = self.allocator.allocate(raw.numel())  # clean: near miss, the own reference falls whether or not the host took one
            if obj is None:
                break
            obj.tensor[: obj.valid].copy_(raw)
            if self.host.put(f"{prefix}-{i}", obj):
                stored += 1
            obj.ref_count_down()
        return stored

    def retrieve(self, key: str, out: torch.Tensor) -> bool:
        obj = self.host.get(key)  # clean: near miss, either source ends in the ref_count_down below
        if obj is None:
            obj = self.disk.read(key, out.nbytes)  # clean: near miss, only when the host had none, and counted down below
        if obj is None:
            return False
        out.view(-1).view(torch.uint8).copy_(obj.tensor[: out.nbytes])
        obj.ref_count_down()
        return True

    def lookup(self, rid: str, keys: Sequence[str]) -> int:
        if rid in self._lookups:
            return len(self._lookups[rid])
        pinned: list[MemoryObj] = []
        for key in keys:
            obj = self.host.get(key)  # clean: near miss, pinned in _lookups until unlock
            if obj is None:
                break
            pinned.append(obj)
        self._lookups[rid] = pinned
        return len(pinned)

    def unlock(self, rid: str) -> None:
        for obj in self._lookups.pop(rid, []):
            obj.ref_count_down()

    def size_of(self, key: str) -> int:
        obj = self.host.get(key)  # leak: the size is returned and the reference forgotten
        return 0 if obj is None else obj.valid

    def promote(self, keys: Sequence[str], nbytes: int) -> int:
        n = 0
        for key in keys:
            if self.host.contains(key):
                continue
            obj = self.disk.read(key, nbytes)  # leak: the host adds its own reference and the one of the read never falls
            if obj is None:
                continue
            if self.host.put(key, obj):
                n += 1
        return n
