from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .buffers import KVPage, PagePool, RegionTable


@dataclass(eq=False)
class PrefillRequest:
    rid: str
    prompt: bytes
    peer: str
    pages: list[KVPage] = field(default_factory=list)
    region: Optional[str] = None
    cancelled: bool = False

    def adopt(self, pages: list[KVPage]) -> None:
        self.pages.extend(pages)

    def release(self, pool: PagePool, regions: RegionTable) -> None:
        if self.region is not None:
            regions.deregister(self.region)
            self.region = None
        pool.put_pages(self.pages)
        self.pages = []
