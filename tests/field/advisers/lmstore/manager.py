from __future__ import annotations

from typing import Sequence

import torch

from .backends import LocalCPUBackend, LocalDiskBackend
from .memory import MemoryObj


class StorageManager:
    def __init__(self, cpu: LocalCPUBackend, disk: LocalDiskBackend) -> None:
        self.cpu = cpu
        self.disk = disk
        self.lookup_pins: dict[str, list[MemoryObj]] = {}

    def store(self, key: str, chunk: torch.Tensor) -> bool:
        obj = self.cpu.allocate()  # clean: near miss, the hot cache takes its own reference and this one goes down
        if obj is None:
            return False
        obj.tensor.copy_(chunk)
        self.cpu.submit_put(key, obj)
        self.disk.put(key, obj)
        obj.ref_count_down()
        return True

    def store_batch(self, keys: Sequence[str], chunks: Sequence[torch.Tensor]) -> bool:
        objs = self.cpu.allocator.batched_allocate(len(keys))  # clean: all go down at the end of the loop
        if objs is None:
            return False
        for key, chunk, obj in zip(keys, chunks, objs):
            obj.tensor.copy_(chunk)
            self.cpu.submit_put(key, obj)
            obj.ref_count_down()
        return True

    def get(self, key: str) -> MemoryObj | None:
        obj = self.cpu.get_blocking(key)  # clean: returned with its reference
        if obj is not None:
            return obj
        if not self.disk.contains(key):
            return None
        obj = self.disk.get_blocking(key)  # clean: near miss, the cache takes a further reference, the first goes to the caller
        if obj is not None:
            self.cpu.submit_put(key, obj)
        return obj

    def load_to(self, keys: Sequence[str], dst: torch.Tensor) -> int:
        loaded = 0
        for key in keys:
            obj = self.get(key)  # leak: the break on a chunk of another shape comes before ref_count_down
            if obj is None:
                break
            if obj.tensor.shape != dst[loaded].shape:
                break
            dst[loaded].copy_(obj.tensor)
            obj.ref_count_down()
            loaded += 1
        return loaded

    def lookup(self, lookup_id: str, keys: Sequence[str]) -> int:
        pins = self.lookup_pins.setdefault(lookup_id, [])
        for key in keys:
            obj = self.cpu.get_blocking(key)  # clean: near miss, added to the pins of the id, which unpin takes down
            if obj is None:
                break
            pins.append(obj)
        return len(pins)

    def unpin(self, lookup_id: str) -> None:
        for obj in self.lookup_pins.pop(lookup_id, []):
            obj.ref_count_down()

    def norm(self, key: str) -> float | None:
        obj = self.get(key)  # clean: taken down in the finally
        if obj is None:
            return None
        try:
            return float(obj.tensor.norm())
        finally:
            obj.ref_count_down()

    def fetch_tensor(self, key: str) -> torch.Tensor | None:
        obj = self.get(key)  # leak: the caller gets a clone and nobody takes the reference down
        if obj is None:
            return None
        return obj.tensor.clone()
