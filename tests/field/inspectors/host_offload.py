"""Offload KV pages to pinned host memory and, behind it, to disk."""
import asyncio
import os
from typing import Optional

import torch


class PinnedStack:
    """Pinned pages; free ids live on a stack with an explicit top."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.memory = torch.empty(pages, page_bytes, dtype=torch.uint8, pin_memory=True)
        self._ids = list(range(pages))
        self._top = pages

    def lift(self) -> Optional[int]:
        if self._top == 0:
            return None
        self._top -= 1
        return self._ids[self._top]

    def lift_many(self, count: int) -> list[int]:
        """All or nothing; empty when not enough pages."""
        got: list[int] = []
        for _ in range(count):
            page = self.lift()  # clean: near miss, a short batch is lowered again
            if page is None:
                for taken in got:
                    self.lower(taken)
                return []
            got.append(page)
        return got

    def lower(self, page: int) -> None:
        self._ids[self._top] = page
        self._top += 1


class DiskTier:
    def __init__(self, root: str) -> None:
        self.root = root
        self._log = open(os.path.join(root, "tier.log"), "a")  # clean: kept in the field, close() closes it

    def path(self, key: str) -> str:
        return os.path.join(self.root, key + ".kv")

    def store(self, key: str, payload: bytes) -> None:
        with open(self.path(key), "wb") as handle:  # clean: closed by the with statement
            handle.write(payload)
        self._log.write(key + "\n")

    def read_into(self, key: str, view: memoryview) -> bool:
        try:
            handle = open(self.path(key), "rb")  # leak: a short read returns with the file open
        except FileNotFoundError:
            return False
        if handle.readinto(view) != len(view):
            return False
        handle.close()
        return True

    def close(self) -> None:
        self._log.close()


class OffloadManager:
    def __init__(self, pinned: PinnedStack, disk: DiskTier, streams: int) -> None:
        self.pinned = pinned
        self.disk = disk
        self.copy_turns = asyncio.Semaphore(streams)
        self.resident: dict[str, int] = {}
        self.loads: dict[str, asyncio.Task] = {}

    def offload(self, key: str, page_view: torch.Tensor) -> bool:
        if key in self.resident:
            return True
        page = self.pinned.lift()  # clean: near miss, demotion makes room, then stored in resident
        if page is None and self.resident:
            self._demote_one()
            page = self.pinned.lift()  # clean: stored in resident
        if page is None:
            return False
        self.pinned.memory[page].copy_(page_view)
        self.resident[key] = page
        return True

    def refresh(self, key: str, page_view: torch.Tensor) -> None:
        """Write a newer version of a page next to the old one."""
        page = self.pinned.lift()  # leak: resident's old page is overwritten, not lowered
        if page is None:
            return
        self.pinned.memory[page].copy_(page_view)
        self.resident[key] = page

    def offload_request(self, rid: str, views: list[torch.Tensor]) -> bool:
        pages = self.pinned.lift_many(len(views))  # leak: pages behind an already resident key are skipped
        if len(pages) < len(views):
            return False
        for i, (page, view) in enumerate(zip(pages, views)):
            key = f"{rid}-{i}"
            if key in self.resident:
                continue
            self.pinned.memory[page].copy_(view)
            self.resident[key] = page
        return True

    async def prefetch(self, key: str) -> Optional[int]:
        """Bring a page from disk; None if it is not there."""
        await self.copy_turns.acquire()  # clean: near miss, the finally clause covers every return
        try:
            page = self.pinned.lift()  # clean: lowered on a miss, else resident
            if page is None:
                return None
            view = memoryview(self.pinned.memory[page].numpy())
            if key in self.resident or not self.disk.read_into(key, view):
                self.pinned.lower(page)
                return None
            self.resident[key] = page
            return page
        finally:
            self.copy_turns.release()

    async def onload(self, key: str, target: torch.Tensor) -> bool:
        await self.copy_turns.acquire()  # leak: a page not resident returns without release
        page = self.resident.get(key)
        if page is None:
            return False
        target.copy_(self.pinned.memory[page], non_blocking=True)
        self.copy_turns.release()
        return True

    async def checksum(self, key: str) -> int:
        bounce = self.pinned.lift()  # clean: near miss, the task below lowers it in its finally
        if bounce is None:
            return 0
        return await asyncio.create_task(self._sum_page(key, bounce))

    async def _sum_page(self, key: str, bounce: int) -> int:
        try:
            row = self.pinned.memory[bounce]
            if not self.disk.read_into(key, memoryview(row.numpy())):
                return 0
            return int(row.sum())
        finally:
            self.pinned.lower(bounce)

    def _demote_one(self) -> None:
        key, page = next(iter(self.resident.items()))
        self.disk.store(key, self.pinned.memory[page].numpy().tobytes())
        del self.resident[key]
        self.pinned.lower(page)

    def close(self) -> None:
        for page in self.resident.values():
            self.pinned.lower(page)
        self.resident.clear()
        self.disk.close()
