"""Drives requests through prefill and decode."""
from __future__ import annotations

import logging

from .blocks import BlockManager
from .staging import RowBuffers, softmax_row
from .state import RequestState

logger = logging.getLogger(__name__)


class Driver:
    def __init__(self, blocks: BlockManager, rows: RowBuffers) -> None:
        self.blocks = blocks
        self.rows = rows
        self.live: dict[str, RequestState] = {}

    def start(self, req: RequestState) -> bool:
        """Share what is cached, allocate the rest."""
        if req.req_id in self.live:
            return False
        for h in req.hashes:
            bid = self.blocks.share(h)  # clean: near miss, appended to the table like an allocated one
            if bid is None:
                bid = self.blocks.allocate()  # clean: near miss, on a shortage drain returns all of the table
                if bid is None:
                    self._drop(req)
                    return False
                self.blocks.publish(bid, h)
            req.table.append(bid)
        self.live[req.req_id] = req
        return True

    def fork(self, parent: RequestState, child_id: str) -> RequestState | None:
        """A child that shares every block of its parent."""
        child = RequestState(child_id, list(parent.hashes))
        for h in parent.hashes:
            bid = self.blocks.share(h)  # leak: an unknown hash returns None and the child with its table is lost
            if bid is None:
                return None
            child.table.append(bid)
        self.live[child_id] = child
        return child

    def preallocate(self, req: RequestState, n: int) -> bool:
        """Room for ``n`` more blocks, all or nothing."""
        ids = [self.blocks.allocate() for _ in range(n)]  # leak: with one None among them the others are dropped
        if None in ids:
            return False
        req.table.extend(ids)
        return True

    def prepare_cow(self, req: RequestState) -> bool:
        """Set a block aside for the next copy-on-write."""
        if req.cow_target is None:
            req.cow_target = self.blocks.allocate()  # leak: finish drains the table but not the copy target
        return req.cow_target is not None

    def apply_cow(self, req: RequestState, index: int) -> None:
        if req.cow_target is None:
            return
        old = req.table[index]
        req.table[index], req.cow_target = req.cow_target, None
        self.blocks.deallocate(old)

    def score(self, req: RequestState, raw) -> float:
        if req.logits is not None:
            self.rows.release_row(req.logits)
        req.logits = softmax_row(self.rows, raw)  # clean: near miss, the earlier row is released just above, finish the last
        return 0.0 if req.logits is None else float(req.logits.max())

    def _drop(self, req: RequestState) -> None:
        for bid in req.drain():
            self.blocks.deallocate(bid)

    def finish(self, req_id: str) -> None:
        req = self.live.pop(req_id, None)
        if req is None:
            return
        self._drop(req)
        if req.logits is not None:
            self.rows.release_row(req.logits)
            req.logits = None
