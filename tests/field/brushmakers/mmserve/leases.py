"""Counted leases of encoder features, keyed by content hash."""
from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Dict, List, Optional

import torch


class FeatureLease:
    def __init__(self, key: str, data: torch.Tensor) -> None:
        self.key = key
        self.data = data
        self.count = 0


class FeatureLeases:
    def __init__(self, n: int, rows: int, hidden: int) -> None:
        self.blank: List[torch.Tensor] = [torch.empty(rows, hidden) for _ in range(n)]
        self.known: "OrderedDict[str, FeatureLease]" = OrderedDict()
        self.mu = threading.Lock()

    def _room(self) -> Optional[torch.Tensor]:
        if self.blank:
            return self.blank.pop()  # clean: returned to the caller
        for key, fl in self.known.items():
            if fl.count == 0:
                del self.known[key]
                return fl.data
        return None

    def lease(self, key: str) -> Optional[FeatureLease]:
        with self.mu:
            fl = self.known.get(key)
            if fl is not None:
                fl.count += 1
                self.known.move_to_end(key)
            return fl

    def enter(self, key: str, fill) -> Optional[FeatureLease]:
        """A new lease, its data written by fill(data) -> bool."""
        with self.mu:
            if key in self.known:
                return None
            data = self._room()  # leak: when fill says no the tensor is in neither list
            if data is None:
                return None
            if not fill(data):
                return None
            fl = FeatureLease(key, data)
            fl.count = 1
            self.known[key] = fl
            return fl

    def lease_or_enter(self, key: str, fill) -> Optional[FeatureLease]:
        fl = self.lease(key)  # clean: returned to the caller
        if fl is None:
            fl = self.enter(key, fill)  # clean: near miss, bound only where the first was None
        return fl

    def end(self, fl: FeatureLease) -> None:
        with self.mu:
            fl.count -= 1

    def end_all(self, fls: Dict[str, FeatureLease]) -> None:
        while fls:
            self.end(fls.popitem()[1])
