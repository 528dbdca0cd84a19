"""Prefix cache: holds one reference for every cached block."""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from .blocks import BlockManager


class PrefixCache:
    def __init__(self, mgr: BlockManager) -> None:
        self.mgr = mgr
        self._by_hash: Dict[int, int] = {}
        self._sticky: Dict[str, int] = {}

    def lookup(self, h: int) -> Optional[int]:
        b = self._by_hash.get(h)
        if b is None:
            return None
        return self.mgr.incref(b)  # clean: the new reference is the caller's

    def insert(self, h: int, block: int) -> None:
        if h in self._by_hash:
            return
        self._by_hash[h] = self.mgr.incref(block)  # clean: held by the table, evict drops it

    def stick(self, tenant: str, block: int) -> None:
        self._sticky[tenant] = self.mgr.incref(block)  # leak: the tenant's former block is overwritten without decref

    def unstick(self, tenant: str) -> None:
        b = self._sticky.pop(tenant, None)
        if b is not None:
            self.mgr.decref(b)

    def evict(self, h: int) -> bool:
        b = self._by_hash.pop(h, None)
        if b is None:
            return False
        self.mgr.decref(b)
        return True

    def match(self, hashes: List[int]) -> List[int]:
        out: List[int] = []
        for h in hashes:
            b = self.lookup(h)  # clean: collected and handed to the caller
            if b is None:
                break
            out.append(b)
        return out

    def match_aligned(self, hashes: List[int], align: int) -> List[int]:
        out = self.match(hashes)  # leak: blocks cut off by alignment keep their reference
        keep = len(out) - len(out) % align
        return out[:keep]

    def contains(self, h: int) -> bool:
        return self.lookup(h) is not None  # leak: reference taken for a yes or no

    def hottest(self, candidates: List[int]) -> Optional[Tuple[int, int]]:
        for h in candidates:
            b = self.lookup(h)  # clean: near miss, handed on with its hash
            if b is not None:
                return h, b
        return None
