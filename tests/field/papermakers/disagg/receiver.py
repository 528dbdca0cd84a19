from __future__ import annotations

from collections import OrderedDict

from .pools import BlockStore, OutOfBlocks, StagingRing


class DecodeReceiver:
    """Preallocates blocks for announced requests and fills them as data comes."""

    def __init__(self, store: BlockStore, ring: StagingRing, wire, max_pending: int = 64):
        self.store = store
        self.ring = ring
        self.wire = wire
        self.max_pending = max_pending
        self.pending: OrderedDict[str, list[int]] = OrderedDict()

    def prealloc(self, rid: str, n: int) -> bool:
        if rid in self.pending:
            return True
        try:
            blocks = self.store.draw(n)  # clean: near miss, stored in pending, overflow drops the oldest entry
        except OutOfBlocks:
            return False
        self.pending[rid] = blocks
        if len(self.pending) > self.max_pending:
            _, stale = self.pending.popitem(last=False)  # clean: dropped at once
            self.store.drop(stale)
        return True

    def land(self, rid: str, table: dict[str, list[int]]) -> bool:
        blocks = self.pending.pop(rid, None)  # leak: blocks of a failed receive are neither tabled nor dropped
        if blocks is None:
            return False
        for b in blocks:
            idx = self.ring.claim_for(self.wire.block_bytes)  # clean: surrendered right after the receive
            if idx is None:
                self.pending[rid] = blocks
                return False
            ok = self.wire.recv(rid, self.ring.chunks[idx])
            if ok:
                self.wire.write_block(b, self.ring.chunks[idx])
            self.ring.surrender(idx)
            if not ok:
                return False
        table[rid] = blocks
        return True

    def cancel(self, rid: str) -> None:
        if rid in self.pending:
            self.store.drop(self.pending.pop(rid))
