"""Host copies of adapters, counted by the requests that name them."""
from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Optional

logger = logging.getLogger(__name__)


@dataclass
class HostAdapter:
    name: str
    rank: int
    path: str
    refs: int = 0


class AdapterRegistry:
    def __init__(self, root: str, max_rank: int = 64) -> None:
        self.root = root
        self.max_rank = max_rank
        self._adapters: dict[str, HostAdapter] = {}

    def incref(self, name: str) -> Optional[HostAdapter]:
        adapter = self._adapters.get(name)
        if adapter is None:
            return None
        adapter.refs += 1
        return adapter

    def decref(self, adapter: HostAdapter) -> None:
        adapter.refs -= 1
        if adapter.refs < 0:
            raise RuntimeError(f"{adapter.name}: refs below zero")

    def register(self, name: str) -> Optional[HostAdapter]:
        path = os.path.join(self.root, name, "adapter_config.json")
        fh = open(path)  # leak: stays open when the rank is refused
        config = json.load(fh)
        rank = int(config.get("r", 8))
        if rank > self.max_rank:
            logger.warning("adapter %s has rank %d > %d", name, rank, self.max_rank)
            return None
        fh.close()
        self._adapters[name] = HostAdapter(name, rank, path)
        return self._adapters[name]

    def read_targets(self, name: str) -> list[str]:
        path = os.path.join(self.root, name, "adapter_config.json")
        with open(path) as fh:  # clean: with statement
            return list(json.load(fh).get("target_modules", ()))

    def unload_idle(self) -> list[str]:
        idle = [n for n, a in self._adapters.items() if a.refs == 0]
        for name in idle:
            del self._adapters[name]
        return idle
