"""One pipeline stage, run in a thread of its own."""
from __future__ import annotations

import logging
import queue
import threading
from typing import Callable, List, Optional

from .ring import ActivationRing, Cell
from .work import WorkItem

log = logging.getLogger(__name__)

Compute = Callable[[bytes, List[int]], bytes]


class Stage(threading.Thread):
    def __init__(self, index: int, compute: Compute, ring: ActivationRing) -> None:
        super().__init__(daemon=True, name=f"stage-{index}")
        self.index = index
        self.compute = compute
        self.ring = ring
        self.inbox: "queue.Queue[Optional[WorkItem]]" = queue.Queue()
        self.next: Optional["Stage"] = None
        self.on_done: Callable[[WorkItem], None] = lambda item: item.dispose()

    def run(self) -> None:
        while True:
            item = self.inbox.get()
            if item is None:
                break
            self._process(item)

    def _process(self, item: WorkItem) -> None:
        out = self.compute(bytes(item.cell.data[:item.cell.filled]), item.tokens)
        item.cell.data[:len(out)] = out
        item.cell.filled = len(out)
        if self.next is not None:
            self.next.inbox.put(item)
        else:
            self.on_done(item)

    def stop(self) -> None:
        self.inbox.put(None)

    # ---- direct passes, not through the inbox ----------------------------------

    def calibrate(self, rounds: int, tokens: List[int]) -> List[int]:
        sizes: List[int] = []
        cell = self.ring.produce()  # leak: rebound at the end of each round, one retire at the end
        for _ in range(rounds):
            if cell is None:
                break
            sizes.append(len(self.compute(bytes(cell.data[:64]), tokens)))
            cell = self.ring.produce()  # leak: lost to the next round's, only the last is retired
        if cell is not None:
            self.ring.retire(cell)
        return sizes

    def exchange(self, cell: Cell) -> Optional[Cell]:
        """Give one cell, get another: for stages which cannot compute in place."""
        fresh = self.ring.produce()  # clean: handed to the caller
        if fresh is None:
            return None
        fresh.filled = cell.filled
        self.ring.retire(cell)
        return fresh

    def bounce(self, item: WorkItem) -> bool:
        fresh = self.exchange(item.cell)  # clean: near miss, replaces item.cell, which exchange retired
        if fresh is None:
            return False
        item.cell = fresh
        return True

    def measure_copy(self, nbytes: int) -> int:
        src = self.ring.produce()  # clean: retired in finally
        if src is None:
            return 0
        try:
            dst = self.ring.produce()  # leak: the finally retires src only
            if dst is None:
                return 0
            dst.data[:nbytes] = src.data[:nbytes]
            return len(dst.data)
        finally:
            self.ring.retire(src)
