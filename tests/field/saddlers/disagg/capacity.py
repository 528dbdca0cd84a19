"""Decode-side capacity: pages are leased per request, leases are counted and can be shared."""
from __future__ import annotations

import itertools
import threading
from typing import Dict, List, Optional


class Lease:
    __slots__ = ("lease_id", "pages", "holders")

    def __init__(self, lease_id: int, pages: List[int]) -> None:
        self.lease_id = lease_id
        self.pages = pages
        self.holders = 1


class PageBroker:
    def __init__(self, pages: int) -> None:
        self._mu = threading.Lock()
        self._pages = list(range(pages))
        self._ids = itertools.count(1)
        self.outstanding: Dict[int, Lease] = {}

    def lease(self, n: int) -> Optional[Lease]:
        with self._mu:
            if len(self._pages) < n:
                return None
            got = [self._pages.pop() for _ in range(n)]
            out = Lease(next(self._ids), got)
            self.outstanding[out.lease_id] = out
            return out

    def share(self, lease: Lease) -> Lease:
        with self._mu:
            lease.holders += 1
        return lease

    def surrender(self, lease: Lease) -> None:
        with self._mu:
            lease.holders -= 1
            if lease.holders == 0:
                del self.outstanding[lease.lease_id]
                self._pages.extend(lease.pages)


class DecodeNode:
    def __init__(self, name: str, pages: int) -> None:
        self.name = name
        self.broker = PageBroker(pages)
        self.draining = False

    def open_window(self, tokens: int, page_size: int = 16) -> Optional[Lease]:
        if self.draining:
            return None
        return self.broker.lease(-(-tokens // page_size))  # clean: handed to the caller

    def close_window(self, lease: Lease) -> None:
        self.broker.surrender(lease)


class Fleet:
    """Wraps the nodes; callers see one ``place`` and one ``unplace``."""

    def __init__(self, nodes: List[DecodeNode]) -> None:
        self.nodes = {n.name: n for n in nodes}
        self._where: Dict[int, str] = {}

    def place(self, tokens: int) -> Optional[Lease]:
        for node in self.nodes.values():
            lease = node.open_window(tokens)  # clean: near miss, None goes on to the next node and a lease is handed to the caller
            if lease is None:
                continue
            self._where[id(lease)] = node.name
            return lease
        return None

    def unplace(self, lease: Lease) -> None:
        self.nodes[self._where.pop(id(lease))].close_window(lease)

    def least_waste(self, tokens: int) -> Optional[Lease]:
        """Places on the node that wastes the fewest pages."""
        candidates: List[Lease] = []
        for node in self.nodes.values():
            lease = node.open_window(tokens)  # clean: the candidates are unplaced except for the winner, which the caller gets
            if lease is not None:
                self._where[id(lease)] = node.name
                candidates.append(lease)
        if not candidates:
            return None
        candidates.sort(key=lambda c: len(c.pages))
        for loser in candidates[1:]:
            self.unplace(loser)
        return candidates[0]

    def headroom(self, tokens: int) -> List[str]:
        names: List[str] = []
        for node in self.nodes.values():
            window = node.open_window(tokens)  # leak: the window is only tested for presence
            if window is not None:
                names.append(node.name)
        return names
