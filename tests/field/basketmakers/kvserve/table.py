"""Page tables of requests."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .pages import PageId, QuotaPages


@dataclass
class ServeRequest:
    rid: str
    prompt: list[int]
    pages: list[PageId] = field(default_factory=list)
    cancelled: bool = False
    tail: Optional[PageId] = None


def take_pages(pool: QuotaPages, n: int) -> list[PageId]:
    """n pages or an empty list."""
    got: list[PageId] = []
    while len(got) < n:
        page = pool.allot()  # clean: near miss, got is given back when the pool is dry
        if page is None:
            give_pages(pool, got)
            return []
        got.append(page)
    return got


def give_pages(pool: QuotaPages, pages: list[PageId]) -> None:
    for page in pages:
        pool.yield_back(page)
    pages.clear()


class TableSet:
    def __init__(self, pool: QuotaPages):
        self.pool = pool
        self.live: dict[str, ServeRequest] = {}

    def install(self, req: ServeRequest, n: int) -> bool:
        pages = take_pages(self.pool, n)  # clean: moved into the request, remove() gives them back
        if not pages:
            return False
        req.pages.extend(pages)
        self.live[req.rid] = req
        return True

    def install_tail(self, req: ServeRequest) -> bool:
        tail = self.pool.allot()  # leak: dropped when the request has a tail already
        if tail is None or req.tail is not None:
            return False
        req.tail = tail
        self.live[req.rid] = req
        return True

    def remove(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        give_pages(self.pool, req.pages)
        if req.tail is not None:
            self.pool.yield_back(req.tail)
            req.tail = None
