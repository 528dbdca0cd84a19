"""Worker half of the connector: layer-wise save and load."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from .store import PAGE_BYTES, PageHandle, PageStore, allocate_pages, allocate_up_to, free_pages

logger = logging.getLogger(__name__)


@dataclass
class SaveJob:
    request_id: str
    layer: int
    pages: list[PageHandle] = field(default_factory=list)


class ConnectorWorker:
    def __init__(self, store: PageStore, min_pages: int = 1) -> None:
        self.store = store
        self.min_pages = min_pages
        self.jobs: dict[tuple[str, int], SaveJob] = {}

    @staticmethod
    def _pages_for(kv: torch.Tensor) -> int:
        return -(-kv.numel() * kv.element_size() // PAGE_BYTES)

    def save_layer(self, rid: str, layer: int, kv: torch.Tensor) -> bool:
        if (rid, layer) in self.jobs:
            return True
        pages = allocate_pages(self.store, self._pages_for(kv))  # clean: near miss, empty when False, else moved into the job
        if not pages:
            return False
        raw = kv.contiguous().view(torch.uint8).flatten()
        for i, h in enumerate(pages):
            part = raw[i * PAGE_BYTES:(i + 1) * PAGE_BYTES]
            h.page[: part.numel()].copy_(part)
        self.jobs[(rid, layer)] = SaveJob(rid, layer, pages)
        return True

    def save_partial(self, rid: str, layer: int, kv: torch.Tensor) -> int:
        if (rid, layer) in self.jobs:
            return len(self.jobs[(rid, layer)].pages)
        pages = allocate_up_to(self.store, self._pages_for(kv))  # leak: fewer than min_pages are dropped at the return
        if len(pages) < self.min_pages:
            logger.info("%s/%d: only %d pages", rid, layer, len(pages))
            return 0
        job = SaveJob(rid, layer)
        job.pages.extend(pages)
        self.jobs[(rid, layer)] = job
        return len(pages)

    def load_layer(self, rid: str, layer: int, out: torch.Tensor) -> None:
        job = self.jobs.pop((rid, layer))
        raw = torch.cat([h.page for h in job.pages])
        out.copy_(raw[: out.numel() * out.element_size()].view(out.dtype).view_as(out))
        free_pages(self.store, job.pages)

    def drop_request(self, rid: str) -> None:
        for key in [k for k in self.jobs if k[0] == rid]:
            free_pages(self.store, self.jobs.pop(key).pages)

    def checksum(self, kv: torch.Tensor) -> int:
        pages = allocate_up_to(self.store, 2)  # leak: only the first page is freed
        if not pages:
            return 0
        head = pages[0]
        head.page.zero_()
        raw = kv.view(torch.uint8).flatten()[:PAGE_BYTES]
        head.page[: raw.numel()].copy_(raw)
        total = int(head.page.sum())
        self.store.free_page(head)
        return total

    def bounce(self, kv: torch.Tensor) -> torch.Tensor:
        h = self.store.allocate_page()  # clean: None-checked, freed after the clone
        if h is None:
            return kv.clone()
        raw = kv.view(torch.uint8).flatten()[:PAGE_BYTES]
        h.page[: raw.numel()].copy_(raw)
        copy = h.page.clone()
        self.store.free_page(h)
        return copy
