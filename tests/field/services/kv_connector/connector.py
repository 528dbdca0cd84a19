from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable

import torch

from .pool import BlockPool, OutOfBlocks, PageHandle

logger = logging.getLogger(__name__)
Send = Callable[[str, int, torch.Tensor], bool]


@dataclass
class Transfer:
    req_id: str
    pages: list[PageHandle] = field(default_factory=list)
    sent: int = 0
    failed: bool = False


class PrefillConnector:
    def __init__(self, pool: BlockPool, send: Send) -> None:
        self.pool = pool
        self.send = send
        self.transfers: dict[str, Transfer] = {}

    def start(self, req_id: str, kv: torch.Tensor) -> Transfer | None:
        if req_id in self.transfers:
            return self.transfers[req_id]
        try:
            pages = self.pool.allocate_slots(kv.shape[0])  # clean: held by the transfer in the table, finish() frees
        except OutOfBlocks:
            return None
        for p, block in zip(pages, kv):
            p.data.copy_(block)
        tr = Transfer(req_id, pages)
        self.transfers[req_id] = tr
        return tr

    def finish(self, req_id: str) -> None:
        tr = self.transfers.pop(req_id, None)
        if tr is None:
            return
        self.pool.free_slots(tr.pages)
        tr.pages.clear()

    def push(self, req_id: str) -> bool:
        tr = self.transfers[req_id]
        for p in tr.pages[tr.sent:]:
            if not self.send(req_id, p.block_id, p.data):
                tr.failed = True
                return False
            tr.sent += 1
        self.finish(req_id)
        return True

    def push_inline(self, req_id: str, kv: torch.Tensor) -> int:
        sent = 0
        for block in kv:
            page = self.pool.allocate_block()  # leak: a failed send breaks off with the page
            page.data.copy_(block)
            if not self.send(req_id, page.block_id, page.data):
                logger.warning("send of %s stopped at %d", req_id, sent)
                break
            sent += 1
            self.pool.free_block(page)
        return sent

    def push_buffered(self, req_id: str, kv: torch.Tensor) -> bool:
        pages = self.pool.allocate_slots(kv.shape[0])  # leak: frees only as many pages as were sent
        sent = 0
        for page, block in zip(pages, kv):
            page.data.copy_(block)
            if not self.send(req_id, page.block_id, page.data):
                break
            sent += 1
        self.pool.free_slots(pages[:sent])
        return sent == len(pages)

    def push_stepwise(self, req_id: str, kv: torch.Tensor) -> bool:
        pages = self.pool.allocate_slots(kv.shape[0])  # clean: near miss, the slice and the rest make up the whole
        sent = 0
        for page, block in zip(pages, kv):
            page.data.copy_(block)
            if not self.send(req_id, page.block_id, page.data):
                break
            sent += 1
        self.pool.free_slots(pages[:sent])
        if sent < len(pages):
            self.pool.free_slots(pages[sent:])
            return False
        return True


class DecodeConnector:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.tables: dict[str, list[PageHandle]] = {}
        self.spare: PageHandle | None = None

    def recv(self, req_id: str, block: torch.Tensor) -> bool:
        page = self.pool.allocate_sane()  # clean: appended to the table, drop() frees
        if page is None:
            return False
        page.data.copy_(block)
        self.tables.setdefault(req_id, []).append(page)
        return True

    def drop(self, req_id: str) -> None:
        self.pool.free_slots(self.tables.pop(req_id, []))

    def reset(self) -> None:
        for rid in list(self.tables):
            self.drop(rid)
        if self.spare is not None:
            self.pool.free_block(self.spare)
            self.spare = None

    def ensure_spare(self) -> PageHandle | None:
        if self.spare is None:
            self.spare = self.pool.allocate_sane()  # clean: reset() frees it
        return self.spare

    def use_spare(self, req_id: str) -> bool:
        page, self.spare = self.spare, None
        if page is None:
            return False
        self.tables.setdefault(req_id, []).append(page)
        return True

    def replace(self, req_id: str, blocks: torch.Tensor) -> None:
        pages = self.pool.allocate_slots(len(blocks))  # leak: put into the table over the pages the request already has
        for p, b in zip(pages, blocks):
            p.data.copy_(b)
        self.tables[req_id] = pages

    def verify(self, block: torch.Tensor) -> bool:
        page = self.pool.allocate_sane()  # leak: a mismatch returns without the free
        if page is None:
            return False
        page.data.copy_(block)
        if not torch.equal(page.data, block):
            return False
        self.pool.free_block(page)
        return True
