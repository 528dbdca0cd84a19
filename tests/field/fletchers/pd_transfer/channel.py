"""Completion-driven RDMA channel (simulated transport)."""
from __future__ import annotations

from typing import Callable, Dict, List, Tuple

from .regions import Region

DoneFn = Callable[[Region, bool], None]


class Channel:

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._seq = 0
        self._pending: Dict[int, Tuple[Region, DoneFn]] = {}

    def post_write(self, region: Region, nbytes: int, on_done: DoneFn) -> int:
        self._seq += 1
        self._pending[self._seq] = (region, on_done)
        return self._seq

    def write_sync(self, region: Region, nbytes: int) -> bool:
        return nbytes > 0

    def poll(self, completions: List[Tuple[int, bool]]) -> int:
        for seq, ok in completions:
            region, on_done = self._pending.pop(seq)
            on_done(region, ok)
        return len(self._pending)
