from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    bid: int
    refs: int = 0
    digest: int | None = None


class BlockPool:
    def __init__(self, n: int) -> None:
        self.blocks = [Block(i) for i in range(n)]
        self.free_q: deque[Block] = deque(self.blocks)
        self.cached: dict[int, Block] = {}

    def num_free(self) -> int:
        return len(self.free_q)

    def get_new(self, n: int) -> list[Block] | None:
        if n > len(self.free_q):
            return None
        out: list[Block] = []
        for _ in range(n):
            b = self.free_q.popleft()
            if b.digest is not None:
                self.cached.pop(b.digest, None)
                b.digest = None
            b.refs = 1
            out.append(b)
        return out

    def touch(self, digests: list[int]) -> list[Block]:
        """Takes a reference on the longest cached prefix."""
        hit: list[Block] = []
        for d in digests:
            b = self.cached.get(d)
            if b is None:
                break
            if b.refs == 0:
                self.free_q.remove(b)
            b.refs += 1
            hit.append(b)
        return hit

    def publish(self, block: Block, digest: int) -> None:
        if digest in self.cached:
            return
        block.digest = digest
        self.cached[digest] = block

    def give_back(self, blocks: list[Block]) -> None:
        for b in reversed(blocks):
            b.refs -= 1
            if b.refs == 0:
                self.free_q.append(b)
