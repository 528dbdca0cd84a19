from __future__ import annotations

import logging
from typing import Callable, Optional

import torch

from .backend import DiskBackend, LocalCPUBackend
from .memory import HostAllocator, MemoryObj

logger = logging.getLogger(__name__)


class CacheEngine:
    def __init__(self, allocator: HostAllocator, cpu: LocalCPUBackend, disk: Optional[DiskBackend], chunk_bytes: int) -> None:
        self.allocator = allocator
        self.cpu = cpu
        self.disk = disk
        self.chunk_bytes = chunk_bytes
        self.lookup_pins: dict[str, list[str]] = {}
        self.layer_objs: dict[str, list[MemoryObj]] = {}

    def store(self, keys: list[str], fill: Callable[[int, torch.Tensor], None]) -> int:
        stored = 0
        for i, key in enumerate(keys):
            obj = self.allocator.allocate(self.chunk_bytes)  # leak: when submit_put refuses, continue skips the ref_down of our reference
            if obj is None:
                break
            fill(i, self.allocator.view(obj))
            if not self.cpu.submit_put(key, obj):
                continue
            if self.disk is not None:
                self.disk.put(key, obj)
            self.allocator.ref_down(obj)
            stored += 1
        return stored

    def _fetch(self, key: str) -> Optional[MemoryObj]:
        obj = self.cpu.get_blocking(key)  # clean: near miss, returned to the caller, the disk is asked only after None
        if obj is None and self.disk is not None:
            obj = self.disk.get_blocking(key)  # clean: returned to the caller
        return obj

    def retrieve(self, keys: list[str], sink: Callable[[int, torch.Tensor], None]) -> int:
        hits = 0
        for i, key in enumerate(keys):
            obj = self._fetch(key)  # clean: near miss, dropped after the sink whether or not it is promoted
            if obj is None:
                break
            sink(i, self.allocator.view(obj))
            self.cpu.submit_put(key, obj)
            self.allocator.ref_down(obj)
            hits += 1
        return hits

    def lookup(self, request_id: str, keys: list[str]) -> int:
        pinned: list[str] = []
        for key in keys:
            if not self.cpu.pin(key):  # leak: a second lookup of the same request overwrites the list and its pins
                break
            pinned.append(key)
        self.lookup_pins[request_id] = pinned
        return len(pinned)

    def lookup_done(self, request_id: str) -> None:
        for key in self.lookup_pins.pop(request_id, []):
            self.cpu.unpin(key)

    def begin_layerwise(self, request_id: str, layers: int) -> bool:
        objs = self.allocator.batched_allocate(self.chunk_bytes, layers)  # clean: near miss, refused as a duplicate they are dropped, else owned by layer_objs
        if objs is None:
            return False
        if request_id in self.layer_objs:
            for obj in objs:
                self.allocator.ref_down(obj)
            return False
        self.layer_objs[request_id] = objs
        return True

    def end_layerwise(self, request_id: str) -> None:
        for obj in self.layer_objs.pop(request_id, []):
            self.allocator.ref_down(obj)

    def contains_all(self, keys: list[str]) -> bool:
        for key in keys:
            obj = self._fetch(key)  # leak: presence is the answer, the reference of each hit is dropped on the floor
            if obj is None:
                return False
        return True

    def move(self, old: str, new: str) -> bool:
        obj = self.cpu.get_blocking(old)  # leak: a refused put under the new key returns without ref_down
        if obj is None:
            return False
        if not self.cpu.submit_put(new, obj):
            logger.info("cannot move %s to %s", old, new)
            return False
        self.allocator.ref_down(obj)
        return True
