"""Fusion buffers, credits and tags used by the engine."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Dict, List, Optional

import torch


class FusionBuffer:
    def __init__(self, ident: int, numel: int):
        self.ident = ident
        self.data = torch.empty(numel)
        self.fill = 0

    def append(self, tensor: torch.Tensor) -> bool:
        end = self.fill + tensor.numel()
        if end > self.data.numel():
            return False
        self.data[self.fill:end].copy_(tensor.view(-1))
        self.fill = end
        return True


class FusionPool:
    def __init__(self, count: int, numel: int):
        self._shelf: List[FusionBuffer] = [FusionBuffer(i, numel) for i in range(count)]
        self._mu = threading.Lock()

    def fetch(self) -> Optional[FusionBuffer]:
        with self._mu:
            if not self._shelf:
                return None
            buf = self._shelf.pop()
            buf.fill = 0
            return buf

    def shelve(self, buf: FusionBuffer) -> None:
        with self._mu:
            self._shelf.append(buf)

    def fetch_empty(self) -> Optional[FusionBuffer]:
        with self._mu:
            while self._shelf:
                buf = self._shelf.pop()  # leak: a buffer that is not empty is taken off the shelf for good
                if buf.fill == 0:
                    return buf
            return None


class Credits:
    """Flow control toward one peer."""

    def __init__(self, total: int):
        self._left = total
        self._cv = threading.Condition()

    def spend(self, n: int = 1) -> None:
        with self._cv:
            self._cv.wait_for(lambda: self._left >= n)
            self._left -= n

    def earn(self, n: int = 1) -> None:
        with self._cv:
            self._left += n
            self._cv.notify_all()


class TagSpace:
    def __init__(self, size: int):
        self._tags = set(range(size))
        self._names: Dict[int, str] = {}

    def allot(self, name: str) -> int:
        tag = self._tags.pop()
        self._names[tag] = name
        return tag

    def reclaim(self, tag: int) -> None:
        self._names.pop(tag, None)
        self._tags.add(tag)

    @contextmanager
    def tag(self, name: str):
        tag = self.allot(name)  # clean: reclaimed in finally
        try:
            yield tag
        finally:
            self.reclaim(tag)
