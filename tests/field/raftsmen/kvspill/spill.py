"""Moves blocks between device and host."""
from __future__ import annotations

import logging
from typing import Dict, List, Optional

from .blocks import DeviceBlocks, HostBlocks

log = logging.getLogger(__name__)


class Spiller:
    def __init__(self, dev: DeviceBlocks, host: HostBlocks) -> None:
        self.dev = dev
        self.host = host
        self._out: Dict[str, List[int]] = {}

    def spill(self, rid: str, table: List[int]) -> bool:
        """Moves the blocks of a rollout to the host; its table is empty afterwards."""
        copies: List[int] = []
        for d in table:
            h = self.host.issue()  # leak: when the host is full those copied so far are dropped
            if h is None:
                log.warning("host is full, %s stays", rid)
                return False
            self.host.data[h].copy_(self.dev.data[d])
            copies.append(h)
        for d in table:
            self.dev.remit(d)
        table.clear()
        self._out[rid] = copies
        return True

    def unspill(self, rid: str) -> List[int]:
        """Device blocks for the caller's table, empty if there is no room."""
        copies = self._out[rid]
        blocks = self.dev.issue_n(len(copies))  # clean: empty means none were issued, else handed to the caller
        if not blocks:
            return []
        for d, h in zip(blocks, copies):
            self.dev.data[d].copy_(self.host.data[h])
            self.host.remit(h)
        del self._out[rid]
        return blocks

    def forget(self, rid: str) -> None:
        for h in self._out.pop(rid, []):
            self.host.remit(h)

    def bounce(self, d: int) -> Optional[int]:
        """Copies one block to another device block by way of the host."""
        h = self.host.issue()  # leak: not remitted when the device has no block
        if h is None:
            return None
        n = self.dev.issue()  # clean: handed to the caller
        if n is None:
            return None
        self.host.data[h].copy_(self.dev.data[d])
        self.dev.data[n].copy_(self.host.data[h])
        self.host.remit(h)
        return n
