"""Lookups, insertions and promotion between the tiers."""
from __future__ import annotations

from typing import Dict, List, Optional

from .disk import SpillDir
from .memory import MemObj, MemoryManager


class CacheEngine:
    """`hot` owns one reference to each of its objects."""

    def __init__(self, memory: MemoryManager, disk: SpillDir, page_bytes: int):
        self.memory = memory
        self.disk = disk
        self.page_bytes = page_bytes
        self.hot: Dict[str, MemObj] = {}

    def acquire(self, key: str) -> Optional[MemObj]:
        """A hot object with a reference for the caller."""
        obj = self.hot.get(key)
        if obj is None:
            return None
        obj.retain()  # clean: the reference is the caller's
        return obj

    def put(self, key: str, data: bytes) -> bool:
        if key in self.hot:
            return True
        obj = self.memory.new()  # clean: near miss, the key was absent, hot owns it until drop
        if obj is None:
            return False
        obj.data = data
        self.hot[key] = obj
        return True

    def drop(self, key: str) -> None:
        obj = self.hot.pop(key, None)
        if obj is not None:
            obj.release()

    def promote(self, key: str) -> bool:
        if key in self.hot:
            return True
        obj = self.memory.new()  # leak: a page that is missing on disk returns without release
        if obj is None:
            return False
        data = self.disk.load(key, self.page_bytes)
        if data is None:
            return False
        obj.data = data
        self.hot[key] = obj
        return True

    def promote_many(self, keys: List[str]) -> int:
        objs = self.memory.new_batch(len(keys))  # clean: near miss, each object is released or goes into hot
        if objs is None:
            return 0
        count = 0
        for key, obj in zip(keys, objs):
            data = self.disk.load(key, self.page_bytes)
            if data is None or key in self.hot:
                obj.release()
                continue
            obj.data = data
            self.hot[key] = obj
            count += 1
        return count

    def promote_prefix(self, keys: List[str]) -> int:
        objs = self.memory.new_batch(len(keys))  # leak: the break at the first miss forgets the remaining objects
        if objs is None:
            return 0
        count = 0
        for key, obj in zip(keys, objs):
            data = self.disk.load(key, self.page_bytes)
            if data is None or key in self.hot:
                obj.release()
                break
            obj.data = data
            self.hot[key] = obj
            count += 1
        return count

    def read(self, key: str) -> Optional[bytes]:
        obj = self.acquire(key)  # clean: released after the bytes have been taken
        if obj is None:
            return None
        data = obj.data
        obj.release()
        return data

    def spill(self, key: str) -> bool:
        obj = self.acquire(key)  # leak: drop releases only the reference of hot, not this one
        if obj is None:
            return False
        self.disk.store(key, obj.data)
        self.drop(key)
        return True

    def spill_unpinned(self, key: str) -> bool:
        obj = self.acquire(key)  # clean: near miss, released once here and once through drop
        if obj is None:
            return False
        idle = obj.pins == 0
        if idle:
            self.disk.store(key, obj.data)
            self.drop(key)
        obj.release()
        return idle

    def scan(self, keys: List[str]) -> int:
        for i, key in enumerate(keys):
            obj = self.acquire(key)  # clean: near miss, pin and reference are undone before the next key
            if obj is None:
                return i
            obj.pin()  # clean: unpinned before the release
            empty = not obj.data
            obj.unpin()
            obj.release()
            if empty:
                return i
        return len(keys)

    def hold(self, keys: List[str]) -> int:
        held = 0
        for key in keys:
            obj = self.hot.get(key)
            if obj is None or not obj.data:
                continue
            obj.pin()  # leak: the continue for a short page skips unpin
            if len(obj.data) < self.page_bytes:
                continue
            held += 1
            obj.unpin()
        return held
