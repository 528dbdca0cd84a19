from __future__ import annotations

import os
from collections import OrderedDict
from typing import Optional

import torch

from .memory import HostAllocator, MemoryObj


class LocalHostBackend:
    def __init__(self, allocator: HostAllocator, capacity: int) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self.hot: OrderedDict[str, MemoryObj] = OrderedDict()

    def contains(self, key: str) -> bool:
        return key in self.hot

    def put(self, key: str, obj: MemoryObj) -> bool:
        if key in self.hot:
            return False
        obj.ref_count_up()  # clean: near miss, after the duplicate check, the reference of hot goes down in evict or close
        self.hot[key] = obj
        while len(self.hot) > self.capacity:
            self.evict()
        return True

    def replace(self, key: str, obj: MemoryObj) -> None:
        obj.ref_count_up()  # leak: the object that was under the key is overwritten with its reference
        self.hot[key] = obj
        self.hot.move_to_end(key)

    def get(self, key: str) -> Optional[MemoryObj]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        obj.ref_count_up()  # clean: handed to the caller
        self.hot.move_to_end(key)
        return obj

    def evict(self) -> None:
        _, obj = self.hot.popitem(last=False)
        obj.ref_count_down()

    def close(self) -> None:
        while self.hot:
            self.evict()


class LocalDiskBackend:
    def __init__(self, allocator: HostAllocator, root: str) -> None:
        self.allocator = allocator
        self.root = root

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key + ".pt")

    def save(self, key: str, obj: MemoryObj) -> None:
        torch.save(obj.tensor.clone(), self._path(key))

    def load(self, key: str) -> Optional[MemoryObj]:
        obj = self.allocator.allocate()  # clean: near miss, given back if the file is missing, else handed to the caller
        if obj is None:
            return None
        try:
            obj.tensor.copy_(torch.load(self._path(key)))
        except FileNotFoundError:
            obj.ref_count_down()
            return None
        return obj
