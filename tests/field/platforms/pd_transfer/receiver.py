"""Decode side: reserves landing blocks and hands them to the decoder."""
from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Dict, List, Optional

from .link import BlockPool, Transfer


class DecodeReceiver:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.landing: Dict[str, List[int]] = {}
        self.ready: "SimpleQueue[Transfer]" = SimpleQueue()

    def reserve(self, request_id: str, count: int) -> bool:
        blocks = self.pool.take(count)  # clean: near miss, an earlier reservation of the request is put back first
        if not blocks:
            return False
        self.cancel(request_id)
        self.landing[request_id] = blocks
        return True

    def reserve_retry(self, request_id: str, count: int, attempts: int) -> bool:
        for attempt in range(attempts):
            blocks = self.pool.take(count)  # leak: a reservation in the table already is overwritten
            if blocks:
                self.landing[request_id] = blocks
                return True
            time.sleep(0.01 * (attempt + 1))
        return False

    def cancel(self, request_id: str) -> None:
        self.pool.put(self.landing.pop(request_id, []))

    def landed(self, request_id: str) -> None:
        blocks = self.landing.pop(request_id, None)
        if blocks is not None:
            self.ready.put(Transfer(request_id, blocks))

    def next_ready(self) -> Optional[Transfer]:
        """The caller puts the blocks back through `retire`."""
        try:
            return self.ready.get_nowait()
        except Empty:
            return None

    def retire(self, transfer: Transfer) -> None:
        blocks, transfer.blocks = transfer.blocks, []
        self.pool.put(blocks)

    def compact(self, transfer: Transfer) -> bool:
        """Move a transfer to fresh blocks."""
        fresh = self.pool.take(len(transfer.blocks))  # leak: the transfer's former blocks are overwritten and never put back
        if not fresh:
            return False
        fresh.sort()
        transfer.blocks = fresh
        return True

    def relocate(self, transfer: Transfer) -> bool:
        fresh = self.pool.take(len(transfer.blocks))  # clean: near miss, swapped with the former blocks, which are put back
        if not fresh:
            return False
        fresh, transfer.blocks = transfer.blocks, fresh
        self.pool.put(fresh)
        return True

    def measure(self, count: int) -> int:
        spare = self.pool.take(count)  # clean: near miss, put back after the loop, an empty list when there were none
        while spare:
            more = self.pool.take(1)  # clean: near miss, each joins spare, which is put back after the loop
            if not more:
                break
            spare += more
        self.pool.put(spare)
        return len(spare)
