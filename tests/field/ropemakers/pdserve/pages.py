"""KV page pool and the rooms in which a prefill and a decode worker meet."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

import torch


class PagePool:
    """Page 0 is the dummy page that padded rows write to."""

    def __init__(self, n_pages: int, page_size: int, heads: int, dim: int):
        self.page_size = page_size
        self.kv = torch.zeros(n_pages, 2, page_size, heads, dim)
        self._free: List[int] = list(range(1, n_pages))
        self._mu = threading.Lock()

    def alloc_pages(self, n: int) -> Optional[List[int]]:
        with self._mu:
            if n > len(self._free):
                return None
            taken, self._free = self._free[:n], self._free[n:]
            return taken

    def free_pages(self, pages: List[int]) -> None:
        with self._mu:
            self._free.extend(pages)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class RoomTable:
    """Bootstrap rooms: small integers both sides agree on."""

    def __init__(self, n: int):
        self._vacant = set(range(n))
        self._mu = threading.Lock()
        self.status: Dict[int, str] = {}

    def book(self) -> int:
        with self._mu:
            if not self._vacant:
                return -1
            room = self._vacant.pop()
        self.status[room] = "booked"
        return room

    def check_out(self, room: int) -> None:
        self.status.pop(room, None)
        with self._mu:
            self._vacant.add(room)
