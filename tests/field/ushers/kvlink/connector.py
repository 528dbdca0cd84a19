from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Optional

from .pages import Page, PageAllocator
from .remote import RemoteMiss, RemoteStore

logger = logging.getLogger(__name__)


@dataclass
class LoadOp:
    req_id: str
    keys: list[str]
    pages: list[Page] = field(default_factory=list)
    spare: Optional[Page] = None


class KVConnector:
    def __init__(self, alloc: PageAllocator, remote: RemoteStore, buffer: memoryview) -> None:
        self.alloc = alloc
        self.remote = remote
        self.buffer = buffer
        self.local: dict[str, Page] = {}
        self.loads: dict[str, LoadOp] = {}

    def _window(self, page: Page) -> memoryview:
        return self.buffer[page.offset : page.offset + self.alloc.page_bytes]

    async def start_load(self, req_id: str, keys: list[str]) -> int:
        op = LoadOp(req_id, keys)
        for key in keys:
            hit = self.local.get(key)
            if hit is not None:
                self.alloc.ref_up(hit)  # clean: near miss, the reference goes down with op.pages
                op.pages.append(hit)
                continue
            page = self.alloc.allocate()  # leak: a remote miss breaks out before the page is in op.pages
            if page is None:
                break
            try:
                await self.remote.fetch(key, self._window(page))
            except RemoteMiss:
                break
            op.pages.append(page)
        self.loads[req_id] = op
        return len(op.pages)

    def attach_spare(self, req_id: str) -> bool:
        op = self.loads.get(req_id)
        if op is None or op.spare is not None:
            return False
        op.spare = self.alloc.allocate()  # leak: finish_load lets the spare go without ref_down, as abort_load does
        return op.spare is not None

    def finish_load(self, req_id: str) -> None:
        op = self.loads.pop(req_id, None)
        if op is None:
            return
        for page in op.pages:
            self.alloc.ref_down(page)

    def abort_load(self, req_id: str) -> None:
        if req_id in self.loads:
            logger.info("load of %s aborted", req_id)
            self.finish_load(req_id)

    def keep(self, key: str, data: bytes) -> bool:
        if key in self.local:
            return True
        page = self.alloc.allocate()  # clean: owned by local until forget
        if page is None:
            return False
        self._window(page)[: len(data)] = data
        self.local[key] = page
        return True

    def forget(self, key: str) -> None:
        page = self.local.pop(key, None)
        if page is not None:
            self.alloc.ref_down(page)

    async def save(self, keys: list[str], chunks: list[bytes]) -> int:
        pages = self.alloc.batched_allocate(len(keys))  # clean: near miss, all go down after the loop, break or not
        if pages is None:
            return 0
        saved = 0
        for key, data, page in zip(keys, chunks, pages):
            self._window(page)[: len(data)] = data
            if not await self.remote.store(key, self._window(page)):
                break
            saved += 1
        for page in pages:
            self.alloc.ref_down(page)
        return saved

    async def copy_key(self, src: str, dst: str) -> bool:
        page = self.local.get(src)
        if page is None:
            return False
        self.alloc.ref_up(page)  # leak: an existing target returns with the reference up
        if await self.remote.exists(dst):
            return False
        ok = await self.remote.store(dst, self._window(page))
        self.alloc.ref_down(page)
        return ok
