"""Decode side: reserves pages for a request, fills them and keeps them until it ends."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch

from .links import LinkPool
from .pages import PageBook, Reservation


class Receiver:
    def __init__(self, book: PageBook, links: LinkPool):
        self.book = book
        self.links = links
        self.held: Dict[str, List[int]] = {}
        self.early: Dict[str, Reservation] = {}

    def _fill(self, page: int, raw: bytes) -> bool:
        t = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        if t.numel() > self.book.region.shape[1]:
            return False
        self.book.region[page, : t.numel()].copy_(t)
        return True

    def accept(self, rid: str, raws: List[bytes]) -> bool:
        if rid in self.held:
            return False
        res = Reservation(self.book, len(raws))  # clean: cancelled on failure, committed into held otherwise
        if not res:
            return False
        if not all(self._fill(p, raw) for p, raw in zip(res.pages, raws)):
            res.cancel()
            return False
        self.held[rid] = res.commit()
        return True

    def accept_stream(self, rid: str, addr: str, n: int, size: int) -> bool:
        if rid in self.held:
            return False
        res = Reservation(self.book, n)  # leak: a short read returns False without cancel
        if not res:
            return False
        with self.links.borrowed(addr) as link:  # clean: with block
            for p in res.pages:
                raw = link.recv(size)
                if len(raw) < size:
                    return False
                self._fill(p, raw)
        self.held[rid] = res.commit()
        return True

    def announce(self, rid: str, n: int) -> bool:
        self.retract(rid)
        res = Reservation(self.book, n)  # clean: near miss, kept in early, retract() runs before each and cancels it
        if not res:
            return False
        self.early[rid] = res
        return True

    def retract(self, rid: str) -> None:
        res = self.early.pop(rid, None)
        if res is not None:
            res.cancel()

    def extend(self, rid: str, raws: List[bytes]) -> int:
        pages = self.book.draw_some(len(raws))  # leak: pages behind the first bad one are in no list
        done = 0
        for page, raw in zip(pages, raws):
            if not self._fill(page, raw):
                break
            self.held.setdefault(rid, []).append(page)
            done += 1
        return done

    def end(self, rid: str) -> None:
        self.retract(rid)
        pages = self.held.pop(rid, None)
        if pages:
            self.book.lay_back(pages)

    def first_page(self, rid: str) -> Optional[torch.Tensor]:
        pages = self.held.get(rid)
        return self.book.region[pages[0]].clone() if pages else None
