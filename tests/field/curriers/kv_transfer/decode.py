"""The decode side: blocks that a peer writes into."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .blocks import BlockAllocator
from .memory import RegistrationCache


class PeerGone(ConnectionError):
    pass


@dataclass
class Incoming:
    rid: str
    blocks: List[int] = field(default_factory=list)
    handle: Optional[int] = None
    grown: Optional[int] = None
    done: bool = False


class DecodeReceiver:
    def __init__(self, alloc: BlockAllocator, regs: RegistrationCache, peer) -> None:
        self.alloc = alloc
        self.regs = regs
        self.peer = peer
        self.table: Dict[str, Incoming] = {}

    def prepare(self, rid: str, n: int) -> Optional[Incoming]:
        blocks = self.alloc.alloc(n)  # leak: a lost peer is survived and the blocks stay with nobody
        if blocks is None:
            return None
        try:
            self.peer.announce(rid, blocks)
        except PeerGone:
            return None
        handle = self.regs.register(tuple(blocks))  # clean: owned by the incoming entry, deregistered in finish
        inc = Incoming(rid, blocks, handle)
        self.table[rid] = inc
        return inc

    def prepare_local(self, rid: str, n: int) -> Optional[Incoming]:
        blocks = self.alloc.alloc(n)  # clean: near miss, freed where the peer is gone, else owned by the entry
        if blocks is None:
            return None
        try:
            self.peer.announce(rid, blocks)
        except PeerGone:
            self.alloc.free(blocks)
            return None
        self.table[rid] = Incoming(rid, blocks)
        return self.table[rid]

    def grow(self, rid: str, n: int) -> bool:
        inc = self.table[rid]
        more = self.alloc.alloc(n)  # clean: moved into the entry's list
        if more is None:
            return False
        inc.blocks += more
        return True

    def regrow(self, rid: str, n: int) -> bool:
        """Give the request n fresh blocks for its recomputed prefix."""
        inc = self.table[rid]
        fresh = self.alloc.alloc(n)  # clean: owned by the entry
        if fresh is None:
            return False
        self.alloc.free(inc.blocks)
        inc.blocks = fresh
        return True

    def register_grown(self, rid: str) -> int:
        """Register again after blocks were added."""
        inc = self.table[rid]
        inc.grown = self.regs.register(tuple(inc.blocks))  # leak: after a second growth it overwrites the handle of the first
        return inc.grown

    def finish(self, rid: str) -> None:
        inc = self.table.pop(rid)
        if inc.handle is not None:
            self.regs.deregister(inc.handle)
        if inc.grown is not None:
            self.regs.deregister(inc.grown)
        self.alloc.free(inc.blocks)

    def probe(self, n: int) -> bool:
        """Whether n blocks could be had now."""
        return self.alloc.alloc(n) is not None  # leak: the blocks are compared with None and dropped

    def can_hold(self, n: int) -> bool:
        got = self.alloc.alloc(n)  # clean: freed at once
        if got is None:
            return False
        self.alloc.free(got)
        return True
