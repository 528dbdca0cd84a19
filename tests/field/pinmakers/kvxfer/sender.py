"""Prefill side: stages layers into pages and sends them over pooled links."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional

import torch

from .links import Link, LinkPool
from .pages import PageBook

log = logging.getLogger(__name__)


class Sender:
    def __init__(self, book: PageBook, links: LinkPool, retries: int = 3):
        self.book = book
        self.links = links
        self.retries = retries
        self.sticky: Dict[str, Link] = {}

    def _stage(self, layers: List[torch.Tensor]) -> Optional[List[int]]:
        pages = self.book.draw(len(layers))  # clean: returned to the caller
        if pages is None:
            return None
        for page, t in zip(pages, layers):
            self.book.region[page, : t.numel()].copy_(t.flatten())
        return pages

    def push(self, addr: str, layers: List[torch.Tensor]) -> bool:
        pages = self._stage(layers)  # clean: laid back in finally
        if pages is None:
            return False
        try:
            with self.links.borrowed(addr) as link:  # clean: with block
                return all(link.send(self.book.region[p].numpy().tobytes()) for p in pages)
        finally:
            self.book.lay_back(pages)

    def push_retrying(self, addr: str, layers: List[torch.Tensor]) -> bool:
        pages = self._stage(layers)  # clean: laid back at the end, nothing returns before
        if pages is None:
            return False
        sent = False
        for attempt in range(self.retries):
            try:
                link = self.links.borrow(addr)  # leak: a failed send goes to the next attempt with the link
            except ConnectionError:
                continue
            if not link.send(self.book.region[pages[0]].numpy().tobytes()):
                log.warning("attempt %d to %s failed", attempt, addr)
                continue
            sent = True
            self.links.restore(link)
            break
        self.book.lay_back(pages)
        return sent

    def push_quick(self, addr: str, layers: List[torch.Tensor]) -> bool:
        pages = self._stage(layers)  # leak: not laid back when every link to addr is in use
        if pages is None:
            return False
        try:
            link = self.links.borrow(addr)  # clean: restored after the send
        except ConnectionError:
            return False
        ok = link.send(self.book.region[pages[0]].numpy().tobytes())
        self.links.restore(link)
        self.book.lay_back(pages)
        return ok

    def sticky_link(self, addr: str) -> Link:
        link = self.sticky.get(addr)
        if link is None or link.broken:
            if link is not None:
                self.links.restore(link)
            self.sticky.pop(addr, None)
            self.sticky[addr] = self.links.borrow(addr)  # clean: near miss, a broken one is restored first, close() empties sticky
        return self.sticky[addr]

    def ping(self, addr: str) -> bool:
        return self.links.borrow(addr).send(b"ping")  # leak: the link is used in passing and never restored

    def close(self) -> None:
        while self.sticky:
            self.links.restore(self.sticky.popitem()[1])
