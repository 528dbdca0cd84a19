import threading
from dataclasses import dataclass, field
from typing import List, Optional

import numpy as np


class RingFull(Exception):
    pass


@dataclass
class Block:
    """Experience of one episode, in a row of the big arrays."""

    row: int
    tokens: np.ndarray
    logprobs: np.ndarray
    task_id: str = ""
    length: int = 0
    reward: float = 0.0

    def write(self, ids, logps):
        n = min(len(ids), len(self.tokens) - self.length)
        self.tokens[self.length:self.length + n] = ids[:n]
        self.logprobs[self.length:self.length + n] = logps[:n]
        self.length += n
        return n == len(ids)


class BlockRing:
    def __init__(self, rows, width):
        self._tokens = np.zeros((rows, width), np.int32)
        self._logprobs = np.zeros((rows, width), np.float32)
        self._free = list(range(rows))
        self._lock = threading.Lock()

    def take(self, task_id):
        with self._lock:
            if not self._free:
                raise RingFull(task_id)
            row = self._free.pop()  # clean: goes to the caller inside the block
        return Block(row, self._tokens[row], self._logprobs[row], task_id)

    def give(self, block):
        with self._lock:
            self._free.append(block.row)


@dataclass
class SlotLease:
    board: "SlotBoard"
    slots: List[int] = field(default_factory=list)

    def release(self):
        slots, self.slots = self.slots, []
        self.board._put(slots)

    def grow(self):
        """One more slot; False when there is none."""
        more = self.board._get(1)  # clean: joins the slots of the lease, which are released together
        if more is None:
            return False
        self.slots += more
        return True


class SlotBoard:
    """Sequence slots of the generation engine."""

    def __init__(self, n):
        self._slots = list(range(n))
        self._lock = threading.Lock()

    def _get(self, n) -> Optional[List[int]]:
        with self._lock:
            if len(self._slots) < n:
                return None
            taken, self._slots = self._slots[:n], self._slots[n:]
            return taken

    def _put(self, slots):
        with self._lock:
            self._slots.extend(slots)

    def lease(self, n=1) -> Optional[SlotLease]:
        slots = self._get(n)  # clean: goes to the caller in a lease
        return None if slots is None else SlotLease(self, slots)
