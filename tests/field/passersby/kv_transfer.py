"""Prefill/decode disaggregation: moves KV pages between workers."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class TransferTask:
    req_id: str
    layer_count: int
    handle: Optional[int] = None
    done: bool = False
    error: Optional[str] = None
    extra: Dict[str, Any] = field(default_factory=dict)


class MemoryRegistry:
    """Stands in front of the NIC: registered regions have numeric handles."""

    def __init__(self, limit: int = 128) -> None:
        self._limit = limit
        self._next = 1
        self._regions: Dict[int, torch.Tensor] = {}

    def register(self, t: torch.Tensor) -> int:
        if len(self._regions) >= self._limit:
            raise MemoryError("registration limit reached")
        handle, self._next = self._next, self._next + 1
        self._regions[handle] = t
        return handle

    def deregister(self, handle: int) -> None:
        self._regions.pop(handle, None)

    def lookup(self, handle: int) -> torch.Tensor:
        return self._regions[handle]


class KVSender:
    def __init__(self, registry: MemoryRegistry, kv: List[torch.Tensor], max_inflight: int = 4) -> None:
        self.registry = registry
        self.kv = kv
        self.sem = asyncio.Semaphore(max_inflight)
        self.tasks: Dict[str, TransferTask] = {}
        self.ready: asyncio.Queue[Optional[TransferTask]] = asyncio.Queue()

    async def _post(self, handle: int, peer: str) -> bool:
        await asyncio.sleep(0)
        return self.registry.lookup(handle).numel() > 0 and bool(peer)

    async def send_layer(self, layer: int, peer: str) -> bool:
        handle = self.registry.register(self.kv[layer])  # clean: deregistered in finally
        try:
            return await self._post(handle, peer)
        finally:
            self.registry.deregister(handle)

    async def send_layers(self, layers: List[int], peer: str) -> int:
        sent = 0
        for layer in layers:
            handle = self.registry.register(self.kv[layer])  # leak: the break after a failed post skips deregister
            ok = await self._post(handle, peer)
            if not ok:
                logger.warning("peer %s refused layer %d", peer, layer)
                break
            self.registry.deregister(handle)
            sent += 1
        return sent

    async def send_limited(self, layer: int, peer: str) -> bool:
        await self.sem.acquire()  # leak: an unknown layer returns without release
        if layer >= len(self.kv):
            return False
        ok = await self.send_layer(layer, peer)
        self.sem.release()
        return ok

    async def send_guarded(self, layer: int, peer: str) -> bool:
        async with self.sem:  # clean: with statement
            if layer >= len(self.kv):
                return False
            return await self.send_layer(layer, peer)

    def start(self, req_id: str, blocks: torch.Tensor) -> TransferTask:
        if req_id in self.tasks:
            return self.tasks[req_id]
        task = TransferTask(req_id, len(self.kv))
        task.handle = self.registry.register(blocks)  # clean: near miss, held by the task, finish deregisters
        self.tasks[req_id] = task
        return task

    def finish(self, req_id: str) -> None:
        task = self.tasks.pop(req_id, None)
        if task is None:
            return
        if task.handle is not None:
            self.registry.deregister(task.handle)
            task.handle = None
        task.done = True

    def retarget(self, req_id: str, blocks: torch.Tensor) -> None:
        task = self.tasks[req_id]
        task.handle = self.registry.register(blocks)  # leak: the handle of the former blocks is overwritten, never deregistered

    def refresh(self, req_id: str, blocks: torch.Tensor) -> None:
        task = self.tasks[req_id]
        fresh = self.registry.register(blocks)  # clean: near miss, the former handle is deregistered first
        if task.handle is not None:
            self.registry.deregister(task.handle)
        task.handle = fresh

    async def enqueue(self, req_id: str, blocks: torch.Tensor) -> None:
        task = TransferTask(req_id, 1, handle=self.registry.register(blocks))  # clean: the drain loop deregisters what it takes from the queue
        await self.ready.put(task)

    async def drain(self, peer: str) -> int:
        n = 0
        while (task := await self.ready.get()) is not None:
            assert task.handle is not None
            task.done = await self._post(task.handle, peer)
            self.registry.deregister(task.handle)
            n += 1
        return n

    async def probe(self, peer: str) -> bool:
        tiny = torch.zeros(1)
        return await self._post(self.registry.register(tiny), peer)  # leak: the handle is not kept by anybody

    async def send_all(self, peer: str) -> List[bool]:
        handles = [self.registry.register(t) for t in self.kv]  # clean: all deregistered below
        results = await asyncio.gather(*(self._post(h, peer) for h in handles))
        for h in handles:
            self.registry.deregister(h)
        return list(results)

    async def send_pair(self, k: torch.Tensor, v: torch.Tensor, peer: str) -> bool:
        hk = self.registry.register(k)  # clean: deregistered on both paths
        hv = self.registry.register(v)  # leak: when K was refused only K is deregistered
        if not await self._post(hk, peer):
            self.registry.deregister(hk)
            return False
        ok = await self._post(hv, peer)
        self.registry.deregister(hk)
        self.registry.deregister(hv)
        return ok
