"""Shared handles of buffers, counted per opener."""
from __future__ import annotations

import itertools
from contextlib import contextmanager

import torch


class HandleRegistry:
    def __init__(self):
        self._ids = itertools.count(1)
        self._bufs: dict[int, torch.Tensor] = {}
        self._openers: dict[int, int] = {}

    def export(self, buf: torch.Tensor) -> int:
        hid = next(self._ids)
        self._bufs[hid] = buf
        self._openers[hid] = 0
        return hid

    def revoke(self, hid: int) -> torch.Tensor:
        if self._openers.pop(hid):
            raise RuntimeError(f"handle {hid} is open")
        return self._bufs.pop(hid)

    def map(self, hid: int) -> torch.Tensor:
        self._openers[hid] += 1
        return self._bufs[hid]

    def unmap(self, hid: int) -> None:
        self._openers[hid] -= 1

    @contextmanager
    def mapped(self, hid: int):
        view = self.map(hid)  # clean: unmapped in finally
        try:
            yield view
        finally:
            self.unmap(hid)
