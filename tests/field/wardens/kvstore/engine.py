from __future__ import annotations

from typing import Optional, Sequence

import torch

from .arena import MemoryObj, PinnedArena
from .backends import DiskBackend, LocalCPUBackend


class CacheEngine:
    def __init__(self, arena: PinnedArena, local: LocalCPUBackend, disk: DiskBackend) -> None:
        self.arena = arena
        self.local = local
        self.disk = disk
        self.prefetched: dict[str, MemoryObj] = {}

    def _lookup(self, key: str, nbytes: int) -> Optional[MemoryObj]:
        early = self.prefetched.pop(key, None)
        if early is not None:
            return early
        obj = self.local.get(key)  # clean: returned to the caller
        if obj is None:
            obj = self.disk.load(key, nbytes)  # clean: near miss, fills only the empty name, returned to the caller
        return obj

    def store(self, keys: Sequence[str], chunks: Sequence[torch.Tensor]) -> int:
        stored = 0
        for key, chunk in zip(keys, chunks):
            if self.local.contains(key):
                continue
            obj = self.arena.allocate(chunk.numel())  # clean: near miss, counted down once the backends hold their own counts
            if obj is None:
                break
            obj.tensor.copy_(chunk)
            self.local.put(key, obj)
            self.disk.submit_put(key, obj)
            obj.ref_count_down()
            stored += 1
        return stored

    def store_group(self, keys: Sequence[str], chunks: Sequence[torch.Tensor]) -> bool:
        objs = self.arena.batched_allocate([c.numel() for c in chunks])  # leak: chunks whose key is cached are skipped without counting down
        if objs is None:
            return False
        for key, chunk, obj in zip(keys, chunks, objs):
            if self.local.contains(key):
                continue
            obj.tensor.copy_(chunk)
            self.local.put(key, obj)
            obj.ref_count_down()
        return True

    def retrieve(self, keys: Sequence[str], out: torch.Tensor, nbytes: int) -> int:
        done = 0
        for key in keys:
            obj = self._lookup(key, nbytes)  # leak: a chunk that does not fit any more breaks before counting down
            if obj is None:
                break
            if done + obj.valid > out.numel():
                break
            out[done : done + obj.valid].copy_(obj.tensor)
            obj.ref_count_down()
            done += obj.valid
        return done

    def prefetch(self, keys: Sequence[str], nbytes: int) -> int:
        ready = 0
        for key in keys:
            if key in self.prefetched or self.local.contains(key):
                continue
            obj = self.disk.load(key, nbytes)  # clean: near miss, new keys only, taken out by lookup or counted down by close
            if obj is None:
                continue
            self.prefetched[key] = obj
            ready += 1
        return ready

    def exists(self, key: str, nbytes: int) -> bool:
        return self._lookup(key, nbytes) is not None  # leak: the object looked up is compared and dropped

    def checksum(self, key: str, nbytes: int) -> int:
        obj = self._lookup(key, nbytes)  # clean: near miss, counted down in finally for both answers
        if obj is None:
            return -1
        try:
            if obj.valid == 0:
                return 0
            return int(obj.tensor.long().sum())
        finally:
            obj.ref_count_down()

    def close(self) -> None:
        self.disk.flush()
        for obj in self.prefetched.values():
            obj.ref_count_down()
        self.prefetched.clear()
        for key in list(self.local.hot):
            self.local.remove(key)
