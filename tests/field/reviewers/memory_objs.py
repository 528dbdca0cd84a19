"""Reference-counted memory objects, a local backend and a cache engine."""
from __future__ import annotations

import threading
from typing import Iterator

import torch


class MemoryObj:
    def __init__(self, parent: "MemoryAllocator", index: int, tensor: torch.Tensor):
        self._parent = parent
        self._index = index
        self._refs = 1
        self.tensor = tensor

    def ref_count_up(self) -> None:
        self._refs += 1

    def ref_count_down(self) -> None:
        self._refs -= 1
        if self._refs == 0:
            self._parent._recycle(self._index)


class MemoryAllocator:
    """Objects start with one reference, which the caller of allocate() owns."""

    def __init__(self, chunks: int, shape: tuple[int, ...]):
        self._slab = torch.zeros((chunks, *shape))
        self._free = list(range(chunks))
        self._lock = threading.Lock()

    def allocate(self) -> MemoryObj | None:
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()  # clean: wrapped in the object that is returned
        return MemoryObj(self, index, self._slab[index])

    def _recycle(self, index: int) -> None:
        with self._lock:
            self._free.append(index)


class LocalBackend:
    """Takes its own reference for what it stores."""

    def __init__(self):
        self._hot: dict[str, MemoryObj] = {}
        self.closed = False

    def submit(self, key: str, obj: MemoryObj) -> None:
        if self.closed or key in self._hot:
            return
        obj.ref_count_up()  # clean: near miss, the reference is dropped by remove() or close()
        self._hot[key] = obj

    def get_blocking(self, key: str) -> MemoryObj | None:
        """The caller must drop the reference of the object it gets."""
        obj = self._hot.get(key)
        if obj is None:
            return None
        obj.ref_count_up()  # clean: the reference belongs to the caller
        return obj

    def touch(self, key: str) -> bool:
        obj = self._hot.get(key)
        if obj is None:
            return False
        obj.ref_count_up()  # leak: touch returns a bool, nobody drops this reference
        return True

    def remove(self, key: str) -> bool:
        obj = self._hot.pop(key, None)
        if obj is None:
            return False
        obj.ref_count_down()
        return True

    def close(self) -> None:
        self.closed = True
        for key in list(self._hot):
            self.remove(key)


class CacheEngine:
    def __init__(self, allocator: MemoryAllocator, backend: LocalBackend):
        self.allocator = allocator
        self.backend = backend

    def store(self, items: list[tuple[str, torch.Tensor]]) -> int:
        n = 0
        for key, kv in items:
            obj = self.allocator.allocate()  # clean: the engine's reference is dropped after submit
            if obj is None:
                break
            obj.tensor.copy_(kv)
            self.backend.submit(key, obj)
            obj.ref_count_down()
            n += 1
        return n

    def store_layer(self, key: str, kv: torch.Tensor | None) -> bool:
        obj = self.allocator.allocate()  # leak: with kv None the method returns holding the reference
        if obj is None:
            return False
        if kv is None:
            return False
        obj.tensor.copy_(kv)
        self.backend.submit(key, obj)
        obj.ref_count_down()
        return True

    def retrieve(self, keys: list[str], out: torch.Tensor) -> int:
        hits = 0
        for i, key in enumerate(keys):
            obj = self.backend.get_blocking(key)  # leak: a shape mismatch breaks out before the reference is dropped
            if obj is None:
                break
            if obj.tensor.shape != out[i].shape:
                break
            out[i].copy_(obj.tensor)
            obj.ref_count_down()
            hits += 1
        return hits

    def retrieve_lazy(self, keys: list[str]) -> Iterator[torch.Tensor]:
        for key in keys:
            obj = self.backend.get_blocking(key)  # clean: near miss, the finally also runs when the consumer closes the generator
            if obj is None:
                return
            try:
                yield obj.tensor
            finally:
                obj.ref_count_down()

    def peek(self, key: str) -> torch.Tensor | None:
        obj = self.backend.get_blocking(key)  # leak: only a clone of the tensor leaves, the reference stays
        return obj.tensor.clone() if obj is not None else None

    def snapshot(self, key: str) -> torch.Tensor | None:
        obj = self.backend.get_blocking(key)  # clean: near miss, cloned and then dropped
        if obj is None:
            return None
        result = obj.tensor.clone()
        obj.ref_count_down()
        return result

    def batched_get(self, keys: list[str]) -> list[MemoryObj]:
        """All or nothing; the caller drops the references."""
        found: list[MemoryObj] = []
        for key in keys:
            obj = self.backend.get_blocking(key)  # clean: near miss, on a miss everything found so far is dropped
            if obj is None:
                for o in found:
                    o.ref_count_down()
                return []
            found.append(obj)
        return found

    def mean(self, keys: list[str]) -> float | None:
        objs = self.batched_get(keys)  # clean: an empty list on a miss, otherwise all dropped
        if not objs:
            return None
        value = float(torch.stack([o.tensor for o in objs]).mean())
        for o in objs:
            o.ref_count_down()
        return value
