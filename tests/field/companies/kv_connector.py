"""Connector between the engine and a remote KV store."""
from __future__ import annotations

import abc
import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Iterable, Optional

import torch

logger = logging.getLogger(__name__)


class MemoryObj:
    def __init__(self, allocator: "HostAllocator", t: torch.Tensor) -> None:
        self._allocator = allocator
        self.tensor = t
        self.refs = 1

    def ref_count_up(self) -> None:
        self.refs += 1

    def ref_count_down(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self._allocator._recycle(self.tensor)


class HostAllocator:
    def __init__(self, chunk: int, count: int) -> None:
        self._chunks = [torch.empty(chunk) for _ in range(count)]

    def allocate_chunk(self) -> Optional[MemoryObj]:
        if not self._chunks:
            return None
        return MemoryObj(self, self._chunks.pop())  # clean: wrapped and handed to the caller

    def _recycle(self, t: torch.Tensor) -> None:
        self._chunks.append(t)


class Backend(abc.ABC):
    @abc.abstractmethod
    async def put(self, key: str, t: torch.Tensor) -> None: ...

    @abc.abstractmethod
    async def get(self, key: str, into: torch.Tensor) -> bool: ...


@dataclass
class ConnectorMeta:
    loads: dict[str, MemoryObj] = field(default_factory=dict)
    saves: list[tuple[str, MemoryObj]] = field(default_factory=list)


class KVConnector:
    def __init__(self, alloc: HostAllocator, backend: Backend, local: bool = True) -> None:
        self.alloc = alloc
        self.backend = backend
        self.hot: dict[str, MemoryObj] = {}
        self.meta = ConnectorMeta()
        self.use_local = local
        self._lock = asyncio.Lock()

    async def load(self, key: str) -> Optional[MemoryObj]:
        obj = self.alloc.allocate_chunk()  # clean: near miss, a miss counts it down
        if obj is None:
            return None
        if not await self.backend.get(key, obj.tensor):
            obj.ref_count_down()
            return None
        return obj

    async def prefetch(self, key: str) -> bool:
        obj = self.alloc.allocate_chunk()  # leak: a remote miss drops the chunk
        if obj is None:
            return False
        hit = await self.backend.get(key, obj.tensor)
        if not hit:
            return False
        self.meta.loads[key] = obj
        return True

    async def load_into(self, key: str, dst: torch.Tensor) -> bool:
        obj = await self.load(key)  # clean: counted down after the copy
        if obj is None:
            return False
        dst.copy_(obj.tensor)
        obj.ref_count_down()
        return True

    async def load_copy(self, key: str) -> Optional[torch.Tensor]:
        obj = await self.load(key)  # leak: cloned and dropped
        return obj.tensor.clone() if obj is not None else None

    async def save(self, key: str, src: torch.Tensor) -> None:
        obj = self.alloc.allocate_chunk()  # clean: counted down after the put, or kept hot for evict_hot()
        if obj is None:
            logger.warning("no host memory for %s", key)
            return
        obj.tensor[: src.numel()].copy_(src.view(-1))
        await self.backend.put(key, obj.tensor)
        if self.use_local and key not in self.hot:
            self.hot[key] = obj
        else:
            obj.ref_count_down()

    def stage_save(self, key: str, src: torch.Tensor) -> None:
        obj = self.alloc.allocate_chunk()  # clean: flush_saves() counts each down
        if obj is not None:
            obj.tensor[: src.numel()].copy_(src.view(-1))
            self.meta.saves.append((key, obj))

    async def flush_saves(self) -> None:
        saves, self.meta.saves = self.meta.saves, []
        for key, obj in saves:
            await self.backend.put(key, obj.tensor)
            obj.ref_count_down()

    def pin_hot(self, key: str) -> Optional[torch.Tensor]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        obj.ref_count_up()  # clean: near miss, unpin_hot() is the other half
        return obj.tensor

    def unpin_hot(self, key: str) -> None:
        self.hot[key].ref_count_down()

    def read_hot(self, key: str, n: int) -> Optional[torch.Tensor]:
        t = self.pin_hot(key)  # leak: a request longer than the chunk returns with the pin
        if t is None:
            return None
        if n > t.numel():
            return None
        out = t[:n].clone()
        self.unpin_hot(key)
        return out

    def sum_hot(self, keys: Iterable[str]) -> float:
        total = 0.0
        for k in keys:
            t = self.pin_hot(k)  # clean: near miss, a None means that nothing was pinned
            if t is None:
                continue
            total += float(t.sum())
            self.unpin_hot(k)
        return total

    def evict_hot(self) -> None:
        for obj in self.hot.values():
            obj.ref_count_down()
        self.hot.clear()

    def finish_loads(self) -> int:
        n = len(self.meta.loads)
        for obj in self.meta.loads.values():
            obj.ref_count_down()
        self.meta.loads = {}
        return n

    async def stream(self, keys: list[str]) -> AsyncIterator[torch.Tensor]:
        for k in keys:
            obj = await self.load(k)  # clean: near miss, counted down after the consumer is done with it
            if obj is None:
                continue
            try:
                yield obj.tensor
            finally:
                obj.ref_count_down()

    async def locked_load(self, key: str) -> Any:
        await self._lock.acquire()  # leak: a hot key returns with the lock held
        if key in self.hot:
            return self.hot[key].tensor
        obj = await self.load(key)  # clean: handed to the caller
        self._lock.release()
        return obj

    async def warm(self, keys: list[str]) -> int:
        objs = await asyncio.gather(*(self.load(k) for k in keys))  # leak: the hits are counted and dropped
        return sum(o is not None for o in objs)
