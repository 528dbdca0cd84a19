from __future__ import annotations

import hashlib
from typing import Iterable

import torch

from .backends import CpuBackend, DiskBackend
from .memory import HostAllocator, MemoryObj


class CacheEngine:
    def __init__(self, allocator: HostAllocator, cpu: CpuBackend, disk: DiskBackend, chunk_tokens: int = 256) -> None:
        self.allocator = allocator
        self.cpu = cpu
        self.disk = disk
        self.chunk_tokens = chunk_tokens
        self._pinned: dict[str, list[MemoryObj]] = {}

    def _keys(self, tokens: list[int]) -> Iterable[str]:
        h = hashlib.sha256()
        for i in range(0, len(tokens) - self.chunk_tokens + 1, self.chunk_tokens):
            h.update(bytes(str(tokens[i : i + self.chunk_tokens]), "ascii"))
            yield h.hexdigest()

    def _find(self, key: str) -> MemoryObj | None:
        obj = self.cpu.get(key)  # clean: near miss, None is replaced by the object from the disk, else returned
        if obj is None:
            obj = self.disk.get(key)  # clean: near miss, the backend takes its own reference, ours is returned
            if obj is not None:
                self.cpu.put(key, obj)
        return obj

    def store(self, tokens: list[int], kv: list[torch.Tensor]) -> int:
        stored = 0
        for key, part in zip(self._keys(tokens), kv):
            obj = self.allocator.allocate(part.numel() * part.element_size())  # clean: near miss, our reference is let go, the backend holds its own
            if obj is None:
                break
            obj.data.copy_(part.contiguous().view(torch.uint8).view(-1))
            self.cpu.put(key, obj)
            self.disk.put(key, obj)
            obj.ref_down()
            stored += 1
        return stored

    def retrieve(self, tokens: list[int], out: list[torch.Tensor]) -> int:
        hits = 0
        for key, dst in zip(self._keys(tokens), out):
            obj = self._find(key)  # leak: an object of another size breaks off the loop with its reference held
            if obj is None:
                break
            if obj.data.numel() != dst.numel() * dst.element_size():
                break
            dst.view(torch.uint8).view(-1).copy_(obj.data)
            obj.ref_down()
            hits += 1
        return hits

    def lookup(self, rid: str, tokens: list[int], pin: bool) -> int:
        self.unpin(rid)
        found: list[MemoryObj] = []
        for key in self._keys(tokens):
            obj = self._find(key)  # clean: near miss, pinned under the request or let go when no pin is asked
            if obj is None:
                break
            found.append(obj)
        if pin:
            self._pinned[rid] = found
        else:
            for obj in found:
                obj.ref_down()
        return len(found)

    def unpin(self, rid: str) -> None:
        for obj in self._pinned.pop(rid, []):
            obj.ref_down()

    def contains(self, key: str) -> bool:
        return self._find(key) is not None  # leak: the object found is only compared with None

    def concat(self, keys: list[str]) -> torch.Tensor | None:
        objs: list[MemoryObj] = []
        for key in keys:
            obj = self._find(key)  # leak: a missing key returns None with the objects before it held
            if obj is None:
                return None
            objs.append(obj)
        joined = torch.cat([o.data for o in objs])
        for o in objs:
            o.ref_down()
        return joined

    def compact(self, keys: list[str], sizes: list[int]) -> bool:
        fresh = self.allocator.allocate_batch(sizes)  # clean: near miss, each is put into the backend and our reference let go
        if fresh is None:
            return False
        for key, new in zip(keys, fresh):
            old = self._find(key)  # clean: near miss, the absent ones skip the copy, the others are let go after it
            if old is not None:
                n = min(old.data.numel(), new.data.numel())
                new.data[:n].copy_(old.data[:n])
                old.ref_down()
            self.cpu.remove(key)
            self.cpu.put(key, new)
        for new in fresh:
            new.ref_down()
        return True
