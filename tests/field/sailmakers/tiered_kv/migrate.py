from __future__ import annotations

import logging
from typing import Dict, List, Optional

import torch

from .pages import DevicePages, PageRef
from .remote import RemoteStore

log = logging.getLogger(__name__)


class Migrator:
    def __init__(self, pages: DevicePages, store: RemoteStore, kv: torch.Tensor) -> None:
        self.pages, self.store, self.kv = pages, store, kv
        self.bounce = torch.empty(kv[0].numel(), dtype=kv.dtype)
        self.landed: Dict[str, PageRef] = {}

    def fetch(self, key: str) -> Optional[PageRef]:
        lease = self.store.lease(key)  # clean: near miss, expired in finally on all three exits
        if lease is None:
            return None
        ref = None
        try:
            ref = self.pages.draw(1)  # clean: dropped when the fetch fails, else returned
            if ref is None:
                return None
            if not lease.fetch(self.bounce):
                ref.drop()
                return None
            self.kv[ref.ids] = self.bounce.view_as(self.kv[ref.ids]).to(self.kv.device)
            return ref
        finally:
            lease.expire()

    def fetch_all(self, keys: List[str]) -> Optional[List[PageRef]]:
        refs = []
        for k in keys:
            ref = self.fetch(k)  # leak: refs fetched before a missing key are dropped without drop()
            if ref is None:
                log.info("chain broken at %s", k)
                return None
            refs.append(ref)
        return refs

    def prefetch(self, keys: List[str]) -> int:
        n = 0
        for k in keys:
            if k in self.landed:
                continue
            lease = self.store.lease(k)  # leak: no free page breaks out before expire()
            if lease is None:
                continue
            ref = self.pages.draw(1)  # clean: kept in self.landed, or dropped when the read fails
            if ref is None:
                break
            if lease.fetch(self.bounce):
                self.kv[ref.ids] = self.bounce.view_as(self.kv[ref.ids]).to(self.kv.device)
                self.landed[k] = ref
                n += 1
            else:
                ref.drop()
            lease.expire()
        return n

    def claim(self, key: str) -> Optional[PageRef]:
        """Ownership of a landed page moves to the caller."""
        return self.landed.pop(key, None)

    def purge(self) -> None:
        for k in list(self.landed):
            self.landed.pop(k).drop()
