"""Pushes KV chunks to decode peers under a credit limit."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Optional

import torch


class PeerCredits:
    """Chunks allowed in flight to one peer."""

    def __init__(self, limit: int) -> None:
        self._sem = asyncio.Semaphore(limit)

    async def debit(self) -> None:
        await self._sem.acquire()  # clean: held on behalf of the caller, who credits

    def credit(self) -> None:
        self._sem.release()


class RegionTable:
    """Registered memory regions; handles come from a stack of ids."""

    def __init__(self, limit: int) -> None:
        self._ids = list(range(limit))
        self._regions: dict[int, torch.Tensor] = {}

    def register(self, tensor: torch.Tensor) -> Optional[int]:
        if not self._ids:
            return None
        handle = self._ids.pop()  # leak: a non-contiguous tensor returns after the id was popped
        if not tensor.is_contiguous():
            return None
        self._regions[handle] = tensor
        return handle

    def deregister(self, handle: int) -> None:
        del self._regions[handle]
        self._ids.append(handle)


class Link:
    async def send(self, chunk: torch.Tensor) -> None: ...

    async def write(self, handle: int, peer: str) -> bool: ...


@dataclass
class Transfer:
    handle: int
    peer: str


class KVConnector:
    def __init__(self, link: Link, credits: PeerCredits, regions: RegionTable) -> None:
        self.link = link
        self.credits = credits
        self.regions = regions
        self.tasks: set[asyncio.Task] = set()
        self.transfers: dict[str, Transfer] = {}

    async def push(self, chunk: torch.Tensor) -> None:
        await self.credits.debit()  # clean: finally credits
        try:
            await self.link.send(chunk)
        finally:
            self.credits.credit()

    async def push_best_effort(self, chunk: torch.Tensor) -> bool:
        await self.credits.debit()  # leak: a dropped connection returns False without credit
        try:
            await self.link.send(chunk)
        except ConnectionError:
            return False
        self.credits.credit()
        return True

    async def push_later(self, chunk: torch.Tensor) -> None:
        await self.credits.debit()  # clean: near miss, the done callback credits
        task = asyncio.create_task(self.link.send(chunk))
        self.tasks.add(task)
        task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        self.credits.credit()

    async def push_layers(self, layers: list[torch.Tensor]) -> int:
        sent = 0
        for layer in layers:
            await self.credits.debit()  # leak: empty layers continue past the credit
            if layer.numel() == 0:
                continue
            await self.link.send(layer)
            sent += 1
            self.credits.credit()
        return sent

    async def push_window(self, chunks: list[torch.Tensor]) -> None:
        for _ in chunks:
            await self.credits.debit()  # clean: near miss, one credit per chunk after the gather
        results = await asyncio.gather(*(self.link.send(c) for c in chunks), return_exceptions=True)
        for _ in results:
            self.credits.credit()

    async def push_with_retry(self, chunk: torch.Tensor, attempts: int) -> bool:
        for attempt in range(attempts):
            await self.credits.debit()  # leak: each failed attempt debits again without credit
            try:
                await self.link.send(chunk)
            except ConnectionError:
                await asyncio.sleep(0.05 * attempt)
                continue
            self.credits.credit()
            return True
        return False

    async def push_persistent(self, chunk: torch.Tensor, attempts: int) -> bool:
        await self.credits.debit()  # clean: near miss, taken once outside the loop, both exits credit
        for attempt in range(attempts):
            try:
                await self.link.send(chunk)
            except ConnectionError:
                await asyncio.sleep(0.05 * attempt)
                continue
            self.credits.credit()
            return True
        self.credits.credit()
        return False

    def open_transfer(self, request_id: str, kv: torch.Tensor, peer: str) -> bool:
        if request_id in self.transfers:
            return True
        handle = self.regions.register(kv)  # clean: filed in transfers, close_transfer deregisters
        if handle is None:
            return False
        self.transfers[request_id] = Transfer(handle, peer)
        return True

    def retarget(self, request_id: str, kv: torch.Tensor) -> None:
        transfer = self.transfers[request_id]
        handle = self.regions.register(kv)  # leak: the transfer's earlier handle is overwritten
        if handle is not None:
            transfer.handle = handle

    def close_transfer(self, request_id: str) -> None:
        transfer = self.transfers.pop(request_id, None)
        if transfer is not None:
            self.regions.deregister(transfer.handle)

    async def write_once(self, kv: torch.Tensor, peer: str) -> bool:
        handle = self.regions.register(kv)  # clean: near miss, deregistered before the result is looked at
        if handle is None:
            return False
        landed = await self.link.write(handle, peer)
        self.regions.deregister(handle)
        return landed
