"""Adapters by name over host pages, with the disk tier beneath."""
from __future__ import annotations

import collections
import logging

import torch

from .pages import Page, PagePool
from .slots import DiskTier

log = logging.getLogger(__name__)


class TierCache:
    def __init__(self, pages: PagePool, disk: DiskTier) -> None:
        self.pages = pages
        self.disk = disk
        self._host: collections.OrderedDict[str, Page] = collections.OrderedDict()

    def _make_room(self) -> None:
        if self._host:
            name, page = self._host.popitem(last=False)
            self.disk.spill(name, page.data)  # clean: kept by the disk tier
            self.pages.deref(page)

    def insert(self, name: str, data: torch.Tensor) -> bool:
        if name in self._host:
            return True
        page = self.pages.obtain()  # clean: only None is replaced by a second attempt
        if page is None:
            self._make_room()
            page = self.pages.obtain()  # clean: in _host until it makes room
        if page is None:
            return False
        page.data[: data.numel()].copy_(data.flatten())
        self._host[name] = page
        return True

    def insert_remote(self, name: str, fetch) -> bool:
        page = self.pages.obtain()  # leak: a failed fetch returns False with the page out
        if page is None:
            return False
        data = fetch(name)
        if data is None:
            log.warning("no adapter %s upstream", name)
            return False
        if name in self._host:
            self.pages.deref(self._host.pop(name))
        page.data[: data.numel()].copy_(data.flatten())
        self._host[name] = page
        return True

    def look_up(self, name: str) -> Page | None:
        """The page with a reference for the caller."""
        page = self._host.get(name)
        if page is None:
            return None
        self._host.move_to_end(name)
        return self.pages.addref(page)  # clean: the caller drops the reference

    def read(self, name: str) -> torch.Tensor | None:
        page = self.look_up(name)  # leak: the data is cloned and the reference never dropped
        return None if page is None else page.data.clone()

    def norm(self, name: str) -> float:
        page = self.look_up(name)  # clean: dropped in finally
        if page is None:
            return 0.0
        try:
            return float(page.data.norm())
        finally:
            self.pages.deref(page)

    def merge(self, names: list[str], out: torch.Tensor) -> int:
        merged = 0
        for name in names:
            page = self._host.get(name)
            if page is None:
                continue
            with self.pages.using(page) as data:  # clean: context manager
                out.add_(data[: out.numel()])
            merged += 1
        return merged

    def has(self, name: str) -> bool:
        return self.look_up(name) is not None or name in self.disk.names  # leak: the reference is only tested
