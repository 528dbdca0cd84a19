from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass(eq=False)
class KVBlock:
    index: int
    refs: int = 0
    digest: Optional[int] = None


class BlockAllocator:
    """Counted KV blocks. `allocate` hands out one reference, `free` drops one."""

    def __init__(self, num_blocks: int) -> None:
        self._free: List[KVBlock] = [KVBlock(i) for i in reversed(range(num_blocks))]
        self._by_digest: Dict[int, KVBlock] = {}
        self.num_blocks = num_blocks

    def allocate(self) -> Optional[KVBlock]:
        if not self._free:
            return None
        block = self._free.pop()
        block.refs = 1
        return block

    def share(self, block: KVBlock) -> KVBlock:
        assert block.refs > 0
        block.refs += 1
        return block

    def lookup(self, digest: int) -> Optional[KVBlock]:
        """A new reference to the block with this content, if one is resident."""
        block = self._by_digest.get(digest)
        if block is None:
            return None
        return self.share(block)  # clean: the reference is returned

    def publish(self, block: KVBlock, digest: int) -> None:
        block.digest = digest
        self._by_digest.setdefault(digest, block)

    def free(self, block: KVBlock) -> None:
        block.refs -= 1
        if block.refs:
            return
        if block.digest is not None and self._by_digest.get(block.digest) is block:
            del self._by_digest[block.digest]
        block.digest = None
        self._free.append(block)

    def allocate_many(self, n: int) -> Optional[List[KVBlock]]:
        """All or nothing."""
        got: List[KVBlock] = []
        while len(got) < n:
            block = self.allocate()  # clean: near miss, the failing turn frees what was gathered
            if block is None:
                self.free_many(got)
                return None
            got.append(block)
        return got

    def free_many(self, blocks: List[KVBlock]) -> None:
        while blocks:
            self.free(blocks.pop())

    @property
    def num_free(self) -> int:
        return len(self._free)
