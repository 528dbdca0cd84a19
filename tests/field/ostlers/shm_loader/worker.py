"""Worker thread that reads samples and fills slots."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence

import numpy as np

from .slots import Slot, SlotTable


@dataclass
class Message:
    index: int
    slot: Slot


class FillWorker(threading.Thread):
    def __init__(
        self,
        table: SlotTable,
        inbox: "queue.Queue[Optional[tuple]]",
        outbox: "queue.Queue[Message]",
        read: Callable[[int], np.ndarray],
    ):
        super().__init__(daemon=True)
        self.table = table
        self.inbox = inbox
        self.outbox = outbox
        self.read = read
        self.skipped = 0

    def run(self) -> None:
        while True:
            job = self.inbox.get()
            if job is None:
                return
            index, keys = job
            if len(keys) == 1:
                self.fill_single(index, keys[0])
            else:
                self.fill_batch(index, keys)

    def fill_batch(self, index: int, keys: Sequence[int]) -> None:
        slot = self.table.claim()  # clean: near miss, sent to the loader in a message
        offset = 0
        for key in keys:
            row = self.read(key)
            slot.array[offset : offset + row.nbytes] = row.view(np.uint8)
            offset += row.nbytes
        slot.filled = offset
        self.outbox.put(Message(index, slot))

    def fill_single(self, index: int, key: int) -> None:
        row = self.read(key)
        slot = self.table.claim_fitting(row.nbytes)  # leak: the slot of an all-zero row stays claimed
        if slot is None:
            self.skipped += 1
            return
        slot.array[: row.nbytes] = row.view(np.uint8)
        slot.filled = row.nbytes
        if not slot.array[: row.nbytes].any():
            self.skipped += 1
            return
        self.outbox.put(Message(index, slot))

    def warm_cache(self, keys: Sequence[int]) -> int:
        """Reads the first samples into spare slots so that the page cache has them."""
        held: List[Slot] = []
        for key in keys:
            row = self.read(key)
            slot = self.table.claim_roomy(row.nbytes)  # clean: near miss, given back by reclaim_all
            if slot is None:
                break
            slot.array[: row.nbytes] = row.view(np.uint8)
            held.append(slot)
        count = len(held)
        self.table.reclaim_all(held)
        return count
