"""Version store: a version may be dropped only when nobody has it pinned."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator, Optional

import torch


class Version:
    def __init__(self, number: int, weights: dict[str, torch.Tensor]):
        self.number = number
        self.weights = weights
        self.pins = 0


class VersionStore:
    def __init__(self, keep: int = 2):
        self.keep = keep
        self._versions: dict[int, Version] = {}
        self._mu = threading.RLock()

    def add(self, number: int, weights: dict[str, torch.Tensor]) -> None:
        with self._mu:
            self._versions[number] = Version(number, weights)
            for n in sorted(self._versions)[: -self.keep]:
                if self._versions[n].pins == 0:
                    del self._versions[n]

    def pin(self, number: int) -> Optional[Version]:
        with self._mu:
            v = self._versions.get(number)
            if v is not None:
                v.pins += 1
            return v

    def pin_latest(self) -> Optional[Version]:
        with self._mu:
            if not self._versions:
                return None
            return self.pin(max(self._versions))  # clean: handed on

    def unpin(self, v: Version) -> None:
        with self._mu:
            v.pins -= 1

    @contextmanager
    def reading(self, number: int) -> Iterator[Optional[Version]]:
        v = self.pin(number)  # clean: unpinned in finally when there is one
        try:
            yield v
        finally:
            if v is not None:
                self.unpin(v)

    def difference(self, a: int, b: int) -> float:
        """Largest change of a weight between two versions, -1 when one of them is gone."""
        old = self.pin(a)  # leak: stays pinned where the other version is gone
        new = self.pin(b)  # clean: when it is None nothing is held, otherwise unpinned
        if old is None:
            if new is not None:
                self.unpin(new)
            return -1.0
        if new is None:
            return -1.0
        worst = max(float((new.weights[k] - t).abs().max()) for k, t in old.weights.items())
        self.unpin(new)
        self.unpin(old)
        return worst
