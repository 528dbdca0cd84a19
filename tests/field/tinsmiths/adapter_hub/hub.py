from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

from .arena import PairedArena, WeightArena

log = logging.getLogger(__name__)


class AdapterHub:
    def __init__(self, dev: PairedArena, host: WeightArena, fetcher: Any, share: bool = True) -> None:
        self.dev = dev
        self.host = host
        self.fetcher = fetcher
        self.share = share
        self.on_device: Dict[str, List[int]] = {}
        self.on_host: Dict[str, int] = {}

    def to_host(self, name: str) -> Optional[int]:
        if name in self.on_host:
            return self.on_host[name]
        row = self.host.hold()  # leak: not unheld when the fetch fails
        if row is None:
            return None
        try:
            self.fetcher.fetch_into(name, self.host.store[row])
        except FileNotFoundError:
            log.error("no adapter %s", name)
            return None
        self.on_host[name] = row
        return row

    def to_device(self, name: str) -> bool:
        if name in self.on_device:
            return True
        pair = self.dev.hold()  # clean: unheld when there's no host row, else in on_device
        if pair is None:
            return False
        row = self.to_host(name)  # clean: near miss, the row belongs to on_host, purge() unholds it
        if row is None:
            self.dev.unhold(pair)
            return False
        self.fetcher.upload(self.host.store[row], pair)
        self.on_device[name] = pair
        return True

    def borrow(self, name: str) -> Optional[int]:
        row = self.on_host.get(name)
        if row is None:
            return None
        if self.share:
            return self.host.hold_again(row)  # clean: returned, give() unholds under the same flag
        return row

    def give(self, row: int) -> None:
        if self.share:
            self.host.unhold(row)

    @contextmanager
    def pinned(self, name: str) -> Iterator[Optional[int]]:
        row = self.borrow(name)  # clean: given in finally
        try:
            yield row
        finally:
            if row is not None:
                self.give(row)

    def purge(self) -> None:
        for pair in self.on_device.values():
            self.dev.unhold(pair)
        self.on_device.clear()
        for row in self.on_host.values():
            self.host.unhold(row)
        self.on_host.clear()
