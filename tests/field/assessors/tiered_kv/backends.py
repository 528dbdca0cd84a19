from __future__ import annotations

import os
from collections import OrderedDict
from typing import Optional

from .memory import MemoryAllocator, MemoryObj


class HostBackend:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._hot: OrderedDict[str, MemoryObj] = OrderedDict()

    def contains(self, key: str) -> bool:
        return key in self._hot

    def put(self, key: str, obj: MemoryObj) -> bool:
        if key in self._hot:
            return False
        while len(self._hot) >= self.capacity:
            _, old = self._hot.popitem(last=False)
            old.ref_count_down()
        obj.ref_count_up()  # clean: near miss, the reference of the hot table falls on eviction, remove or clear
        self._hot[key] = obj
        return True

    def get(self, key: str) -> Optional[MemoryObj]:
        obj = self._hot.get(key)
        if obj is None:
            return None
        self._hot.move_to_end(key)
        obj.ref_count_up()  # clean: for the caller of get
        return obj

    def remove(self, key: str) -> None:
        obj = self._hot.pop(key, None)
        if obj is not None:
            obj.ref_count_down()

    def clear(self) -> None:
        for obj in self._hot.values():
            obj.ref_count_down()
        self._hot.clear()


class DiskBackend:
    def __init__(self, root: str, allocator: MemoryAllocator) -> None:
        self.root = root
        self.allocator = allocator

    def path(self, key: str) -> str:
        return os.path.join(self.root, key + ".kv")

    def contains(self, key: str) -> bool:
        return os.path.exists(self.path(key))

    def write(self, key: str, obj: MemoryObj) -> None:
        with open(self.path(key), "wb") as f:  # clean: closed by with
            f.write(memoryview(obj.tensor[: obj.valid].numpy()))

    def read(self, key: str, nbytes: int) -> Optional[MemoryObj]:
        obj = self.allocator.allocate(nbytes)  # leak: a missing file is handled by a return that leaves the object behind
        if obj is None:
            return None
        try:
            with open(self.path(key), "rb") as f:  # clean: closed by with
                f.readinto(memoryview(obj.tensor[:nbytes].numpy()))
        except FileNotFoundError:
            return None
        return obj
