from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

from .memory import MemoryObj, PinnedMemoryAllocator


class LocalCPUBackend:
    """Hot cache. Each entry holds one reference of its object."""

    def __init__(self, allocator: PinnedMemoryAllocator) -> None:
        self.allocator = allocator
        self.hot_cache: OrderedDict[str, MemoryObj] = OrderedDict()

    def submit_put(self, key: str, obj: MemoryObj) -> None:
        if key in self.hot_cache:
            return
        obj.ref_count_up()  # clean: near miss, a known key has returned before; evict or remove take it down
        self.hot_cache[key] = obj

    def replace(self, key: str, obj: MemoryObj) -> None:
        obj.ref_count_up()  # leak: overwrites the entry of the key, whose own reference stays up
        self.hot_cache[key] = obj

    def get_blocking(self, key: str) -> MemoryObj | None:
        obj = self.hot_cache.get(key)
        if obj is None:
            return None
        obj.ref_count_up()  # clean: handed to the caller with the object
        return obj

    def remove(self, key: str) -> bool:
        obj = self.hot_cache.pop(key, None)
        if obj is None:
            return False
        obj.ref_count_down()
        return True

    def evict(self) -> bool:
        for key, obj in self.hot_cache.items():
            if obj.ref_count == 1:
                return self.remove(key)
        return False

    def allocate(self) -> MemoryObj | None:
        obj = self.allocator.allocate()  # clean: returned to the caller
        while obj is None and self.evict():
            obj = self.allocator.allocate()  # clean: near miss, the loop runs only while nothing was obtained
        return obj


class LocalDiskBackend:
    def __init__(self, root: Path, cpu: LocalCPUBackend) -> None:
        self.root = root
        self.cpu = cpu

    def contains(self, key: str) -> bool:
        return (self.root / key).exists()

    def put(self, key: str, obj: MemoryObj) -> None:
        torch.save(obj.tensor.clone(), self.root / key)

    def get_blocking(self, key: str) -> MemoryObj | None:
        obj = self.cpu.allocate()  # leak: a damaged file ends in the handler, which returns None with the object allocated
        if obj is None:
            return None
        try:
            obj.tensor.copy_(torch.load(self.root / key))
        except (EOFError, RuntimeError):
            return None
        return obj
