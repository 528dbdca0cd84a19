from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Optional

from .memory import HostAllocator, MemoryObj


class LocalCPUBackend:
    def __init__(self, allocator: HostAllocator, capacity: int) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self.hot: OrderedDict[str, MemoryObj] = OrderedDict()

    def submit_put(self, key: str, obj: MemoryObj) -> bool:
        """Keeps a reference of its own; the caller still owns the one it came with."""
        if key in self.hot:
            return False
        while len(self.hot) >= self.capacity:
            if not self.evict_one():
                return False
        self.allocator.ref_up(obj)  # clean: held by hot, evict_one or clear drop it
        self.hot[key] = obj
        return True

    def evict_one(self) -> bool:
        for key, obj in self.hot.items():
            if obj.pin_count == 0:
                del self.hot[key]
                self.allocator.ref_down(obj)
                return True
        return False

    def get_blocking(self, key: str) -> Optional[MemoryObj]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        self.allocator.ref_up(obj)  # clean: near miss, the caller receives the reference
        self.hot.move_to_end(key)
        return obj

    def pin(self, key: str) -> bool:
        obj = self.hot.get(key)
        if obj is None:
            return False
        obj.pin_count += 1
        return True

    def unpin(self, key: str) -> None:
        obj = self.hot.get(key)
        if obj is not None and obj.pin_count > 0:
            obj.pin_count -= 1

    def clear(self) -> None:
        for obj in self.hot.values():
            self.allocator.ref_down(obj)
        self.hot.clear()


class DiskBackend:
    def __init__(self, root: Path, allocator: HostAllocator) -> None:
        self.root = root
        self.allocator = allocator

    def put(self, key: str, obj: MemoryObj) -> None:
        (self.root / key).write_bytes(self.allocator.view(obj).numpy().tobytes())

    def get_blocking(self, key: str) -> Optional[MemoryObj]:
        path = self.root / key
        if not path.exists():
            return None
        obj = self.allocator.allocate(path.stat().st_size)  # leak: a truncated file returns None with the object allocated
        if obj is None:
            return None
        raw = path.read_bytes()
        if len(raw) != obj.nbytes:
            return None
        self.allocator.view(obj).numpy()[:] = memoryview(raw)
        return obj
