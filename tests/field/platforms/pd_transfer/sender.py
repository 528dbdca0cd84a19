"""Prefill side: sends finished blocks while credits last."""
from __future__ import annotations

from typing import Callable, Dict, List, Optional

from .link import BlockPool, CreditWindow, Transfer

OnSent = Callable[[], None]


class PrefillSender:
    def __init__(self, pool: BlockPool, window: CreditWindow, post: Callable[[List[int], OnSent], bool]) -> None:
        self.pool = pool
        self.window = window
        self.post = post
        self.active: Dict[str, Transfer] = {}

    def begin(self, request_id: str, count: int) -> Optional[Transfer]:
        if request_id in self.active:
            return None
        blocks = self.pool.take(count)  # leak: no credits within the timeout returns None with the blocks taken
        if not blocks:
            return None
        if not self.window.consume(count, timeout=1.0):  # clean: near miss, moved to the transfer, finish replenishes it
            return None
        transfer = Transfer(request_id, blocks, count)
        self.active[request_id] = transfer
        return transfer

    def finish(self, request_id: str) -> None:
        transfer = self.active.pop(request_id, None)
        if transfer is None:
            return
        self.pool.put(transfer.blocks)
        self.window.replenish(transfer.credits)

    def send_now(self, blocks: List[int]) -> bool:
        count = len(blocks)
        if not self.window.consume(count, timeout=0.1):  # clean: near miss, the callback replenishes, or the refused branch does
            return False
        if not self.post(blocks, lambda: self.window.replenish(count)):
            self.window.replenish(count)
            return False
        return True

    def send_each(self, blocks: List[int]) -> int:
        sent = 0
        for block in blocks:
            if not self.window.consume(1, timeout=0.1):  # leak: a refused post ends the loop without a replenish
                break
            if not self.post([block], lambda: self.window.replenish(1)):
                break
            sent += 1
        return sent

    def top_up(self, transfer: Transfer, count: int) -> bool:
        """Add blocks to an active transfer."""
        more = self.pool.take(count)  # clean: near miss, put back without credits, else joined to the transfer's blocks
        if not more:
            return False
        if not self.window.consume(len(more), timeout=0.1):  # leak: the transfer's credit count is not raised, so finish returns too few
            self.pool.put(more)
            return False
        transfer.blocks += more
        return True
