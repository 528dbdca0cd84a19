from __future__ import annotations

import logging
import time
from typing import Iterator

from .pools import BlockStore, StagingRing
from .registry import RoomRegistry

log = logging.getLogger(__name__)


class PrefillSender:
    def __init__(self, registry: RoomRegistry, store: BlockStore, ring: StagingRing, wire):
        self.registry = registry
        self.store = store
        self.ring = ring
        self.wire = wire

    def _stage(self, block: int) -> int | None:
        """Ring index with the block's bytes; the caller surrenders it."""
        idx = self.ring.claim()  # clean: returned to the caller
        if idx is None:
            return None
        self.wire.read_block(block, self.ring.chunks[idx])
        return idx

    def push(self, rid: str, blocks: list[int], peer: str) -> bool:
        ho = self.registry.start(rid, blocks, peer)  # clean: finished in finally
        if ho is None:
            return False
        try:
            for block in ho.blocks:
                if not self._push_one(ho.peer, ho.room, block):
                    return False
            return True
        finally:
            self.registry.finish(rid)

    def _push_one(self, peer: str, room: int, block: int) -> bool:
        for attempt in range(4):
            idx = self._stage(block)  # clean: near miss, surrendered before each new attempt
            if idx is None:
                time.sleep(0.001 << attempt)
                continue
            ok = self.wire.send(peer, room, self.ring.chunks[idx])
            self.ring.surrender(idx)
            if ok:
                return True
        return False

    def checksum(self, blocks: list[int]) -> int:
        crc = 0
        for block in blocks:
            idx = self._stage(block)  # leak: all-zero blocks continue past surrender
            if idx is None:
                return -1
            chunk = self.ring.chunks[idx]
            if not any(chunk):
                continue
            crc ^= hash(chunk.tobytes())
            self.ring.surrender(idx)
        return crc

    def staged(self, blocks: list[int]) -> Iterator[memoryview]:
        for block in blocks:
            idx = self._stage(block)  # clean: surrendered in finally, also when the generator is closed
            if idx is None:
                return
            try:
                yield self.ring.chunks[idx]
            finally:
                self.ring.surrender(idx)

    def replicate(self, rid: str, blocks: list[int], peers: list[str]) -> int:
        held = self.store.hold(blocks)  # leak: with no peer alive the extra references stay
        alive = [p for p in peers if self.wire.alive(p)]
        if not alive:
            log.info("%s: nobody to replicate to", rid)
            return 0
        for chunk in self.staged(held):
            for p in alive:
                self.wire.send(p, 0, chunk)
        self.store.drop(held)
        return len(alive)
