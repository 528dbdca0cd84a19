from collections import deque
from typing import Deque, Dict, List, Optional, Sequence

BLOCK = 16


class Block:
    __slots__ = ("bid", "ref", "key")

    def __init__(self, bid: int):
        self.bid = bid
        self.ref = 0
        self.key: Optional[int] = None


class BlockManager:
    def __init__(self, n: int, watermark: int = 2):
        self.blocks = [Block(i) for i in range(n)]
        self.free_ids: Deque[int] = deque(range(n))
        self.watermark = watermark
        self.prefix: Dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def _pop(self) -> Block:
        b = self.blocks[self.free_ids.popleft()]
        if b.key is not None:
            self.prefix.pop(b.key, None)
            b.key = None
        b.ref = 1
        return b

    def allocate(self, n: int) -> Optional[List[Block]]:
        if self.num_free - n < self.watermark:
            return None
        return [self._pop() for _ in range(n)]

    def append_block(self) -> Optional[Block]:
        return self._pop() if self.free_ids else None

    def allocate_aligned(self, n: int) -> Optional[List[Block]]:
        out: List[Block] = []
        while len(out) < n and self.free_ids:
            b = self._pop()  # leak: a first block with an odd id is skipped and goes back to no list
            if not out and b.bid % 2:
                continue
            out.append(b)
        if len(out) < n:
            self.free(out)
            return None
        return out

    def free(self, blocks: Sequence[Block]) -> None:
        for b in reversed(blocks):
            b.ref -= 1
            if b.ref == 0:
                self.free_ids.append(b.bid)

    def publish(self, key: int, block: Block) -> None:
        if key not in self.prefix:
            self.prefix[key] = block.bid
            block.key = key

    def match(self, keys: Sequence[int]) -> List[Block]:
        """Longest cached prefix; each block returned carries a new reference."""
        hit: List[Block] = []
        for k in keys:
            bid = self.prefix.get(k)
            if bid is None:
                break
            b = self.blocks[bid]
            if b.ref == 0:
                self.free_ids.remove(bid)
            b.ref += 1
            hit.append(b)
        return hit

    def share(self, blocks: Sequence[Block]) -> List[Block]:
        for b in blocks:
            b.ref += 1
        return list(blocks)
