"""Versions of the weights with reader counts, and the buckets that carry them."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class Version:
    number: int
    tensors: dict[str, torch.Tensor]
    readers: int = 0


@dataclass
class ReadLease:
    table: "VersionTable"
    version: Version

    @property
    def number(self) -> int:
        return self.version.number

    def end(self) -> None:
        self.table._unread(self.version)


class VersionTable:
    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self._versions: dict[int, Version] = {}
        self._cv = threading.Condition()

    def read(self, number: int) -> Optional[ReadLease]:
        with self._cv:
            version = self._versions.get(number)
            if version is None:
                return None
            version.readers += 1
            return ReadLease(self, version)

    def read_latest(self) -> Optional[ReadLease]:
        with self._cv:
            if not self._versions:
                return None
            version = self._versions[max(self._versions)]
            version.readers += 1
            return ReadLease(self, version)

    def _unread(self, version: Version) -> None:
        with self._cv:
            version.readers -= 1
            self._cv.notify_all()

    def add(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        with self._cv:
            self._versions[number] = Version(number, tensors)

    def retire_old(self, timeout: float) -> int:
        with self._cv:
            old = sorted(self._versions)[: -self.keep]
            gone = 0
            for number in old:
                version = self._versions[number]
                if self._cv.wait_for(lambda: version.readers == 0, timeout):
                    del self._versions[number]
                    gone += 1
            return gone


class BucketPool:
    """Equal buckets for broadcast; lent out by index."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.storage = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
        self._free = list(range(count))
        self._cv = threading.Condition()

    def lend(self) -> int:
        with self._cv:
            self._cv.wait_for(lambda: bool(self._free))
            return self._free.pop()

    def lend_some(self, most: int) -> list[int]:
        with self._cv:
            n = min(most, len(self._free))
            taken, self._free = self._free[:n], self._free[n:]
            return taken

    def reclaim(self, index: int) -> None:
        with self._cv:
            self._free.append(index)
            self._cv.notify()

    def reclaim_all(self, indices: list[int]) -> None:
        for index in indices:
            self.reclaim(index)
