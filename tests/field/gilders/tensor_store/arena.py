"""Reference-counted tensors in a node-local arena."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

import numpy as np


class StoredTensor:
    __slots__ = ("key", "array", "count")

    def __init__(self, key: str, array: np.ndarray):
        self.key = key
        self.array = array
        self.count = 0


class Arena:
    def __init__(self, capacity_bytes: int = 1 << 20):
        self.capacity = capacity_bytes
        self.used = 0
        self._items: Dict[str, StoredTensor] = {}
        self._lock = threading.RLock()

    def put(self, key: str, array: np.ndarray) -> bool:
        with self._lock:
            if key in self._items:
                return False
            while self.used + array.nbytes > self.capacity:
                if not self._evict_one():
                    return False
            self._items[key] = StoredTensor(key, array)
            self.used += array.nbytes
            return True

    def _evict_one(self) -> bool:
        for key, item in self._items.items():
            if item.count == 0:
                self.used -= item.array.nbytes
                del self._items[key]
                return True
        return False

    def addref(self, key: str) -> Optional[StoredTensor]:
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                item.count += 1
            return item

    def unref(self, item: StoredTensor) -> None:
        with self._lock:
            item.count -= 1

    def counts(self) -> Dict[str, int]:
        return {k: v.count for k, v in self._items.items() if v.count}

    def rename(self, old: str, new: str) -> bool:
        item = self.addref(old)  # leak: a taken new name returns with the count raised
        if item is None:
            return False
        with self._lock:
            if new in self._items:
                return False
            del self._items[old]
            item.key = new
            self._items[new] = item
        self.unref(item)
        return True

    def addref_all(self, keys: List[str]) -> Optional[List[StoredTensor]]:
        items: List[StoredTensor] = []
        for key in keys:
            item = self.addref(key)  # clean: near miss, a missing key unrefs those before it
            if item is None:
                for got in reversed(items):
                    self.unref(got)
                return None
            items.append(item)
        return items
