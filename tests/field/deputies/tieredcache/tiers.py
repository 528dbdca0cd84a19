from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import torch

from .objects import MemoryObj, PagedAllocator


class HostTier:
    """LRU of memory objects. get() returns a referenced object, which the caller has to ref_down."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lru: OrderedDict[str, MemoryObj] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._lru

    def get(self, key: str) -> MemoryObj | None:
        obj = self._lru.get(key)
        if obj is None:
            return None
        self._lru.move_to_end(key)
        obj.ref_up()  # clean: the reference goes to the caller
        return obj

    def put(self, key: str, obj: MemoryObj) -> None:
        """Keeps its own reference; the caller's stays with the caller."""
        if key in self._lru:
            return
        obj.ref_up()  # clean: the reference of the table, taken down by eviction or clear()
        self._lru[key] = obj
        while len(self._lru) > self.capacity:
            _, victim = self._lru.popitem(last=False)
            victim.ref_down()

    def refresh(self, key: str, obj: MemoryObj) -> None:
        obj.ref_up()  # leak: the object under the same key is overwritten with the table's reference still up
        self._lru[key] = obj
        self._lru.move_to_end(key)

    def clear(self) -> None:
        while self._lru:
            self._lru.popitem()[1].ref_down()


class DiskTier:
    def __init__(self, root: Path, alloc: PagedAllocator) -> None:
        self.root = root
        self.alloc = alloc

    def path(self, key: str) -> Path:
        return self.root / f"{key}.kv"

    def save(self, key: str, obj: MemoryObj) -> None:
        self.path(key).write_bytes(obj.tensor.numpy().tobytes())

    def load(self, key: str) -> MemoryObj | None:
        try:
            size = os.path.getsize(self.path(key))
        except FileNotFoundError:
            return None
        obj = self.alloc.allocate(size)  # leak: a short read is answered with None and the object's reference stays up
        if obj is None:
            return None
        data = self.path(key).read_bytes()
        if len(data) != size:
            return None
        obj.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return obj
