from __future__ import annotations

import queue
from typing import Iterable, List, Optional

from .ring import Ring, Slot


class Writer:
    def __init__(self, ring: Ring, outs: "List[queue.Queue[Optional[Slot]]]") -> None:
        self.ring = ring
        self.outs = outs
        self._open: Optional[Slot] = None

    def _publish(self, slot: Slot) -> None:
        self.ring.seal(slot, len(self.outs))
        for out in self.outs:
            out.put(slot)

    def write(self, data: bytes) -> bool:
        slot = self.ring.claim(timeout=1.0)  # clean: near miss, unclaimed when too long, else published to readers
        if slot is None:
            return False
        if len(data) > self.ring.slot_size:
            self.ring.unclaim(slot)
            return False
        slot.view[:len(data)] = data
        slot.length = len(data)
        self._publish(slot)
        return True

    def write_pair(self, head: bytes, body: bytes) -> bool:
        first = self.ring.claim(timeout=1.0)  # leak: not unclaimed when the second claim runs into its timeout
        if first is None:
            return False
        second = self.ring.claim(timeout=0.1)  # clean: published after the first
        if second is None:
            return False
        for slot, data in ((first, head), (second, body)):
            slot.view[:len(data)] = data
            slot.length = len(data)
            self._publish(slot)
        return True

    def write_urgent(self, data: bytes) -> int:
        slot = self.ring.claim(timeout=0.0)  # leak: sealed for all readers, but a full queue never gets it, so the count stays up
        if slot is None:
            return 0
        slot.view[:len(data)] = data
        slot.length = len(data)
        self.ring.seal(slot, len(self.outs))
        sent = 0
        for out in self.outs:
            try:
                out.put_nowait(slot)
            except queue.Full:
                continue
            sent += 1
        return sent

    def append(self, data: bytes) -> bool:
        if self._open is not None and self._open.length + len(data) > self.ring.slot_size:
            self.flush()
        if self._open is None:
            self._open = self.ring.claim(timeout=1.0)  # clean: near miss, only when none is open, flush publishes it
        if self._open is None:
            return False
        end = self._open.length + len(data)
        self._open.view[self._open.length:end] = data
        self._open.length = end
        return True

    def flush(self) -> None:
        if self._open is not None:
            self._publish(self._open)
            self._open = None

    def write_many(self, items: Iterable[bytes]) -> int:
        sent = 0
        for item in items:
            slot = self.ring.claim(timeout=1.0)  # leak: empty items continue with a slot in hand
            if slot is None:
                break
            if not item:
                continue
            slot.view[:len(item)] = item
            slot.length = len(item)
            self._publish(slot)
            sent += 1
        return sent

    def close(self) -> None:
        self.flush()
        for out in self.outs:
            out.put(None)
