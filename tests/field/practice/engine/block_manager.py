from collections import deque
from typing import Deque, Dict, List, Optional


class KVBlock:
    __slots__ = ("block_id", "ref_cnt", "block_hash")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: Optional[int] = None


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.free_queue: Deque[KVBlock] = deque(self.blocks)
        self.by_hash: Dict[int, KVBlock] = {}

    def get_num_free(self) -> int:
        return len(self.free_queue)

    def allocate_slots(self, num_tokens: int) -> Optional[List[KVBlock]]:
        n = -(-num_tokens // self.block_size)
        if n > len(self.free_queue):
            return None
        out = []
        for _ in range(n):
            blk = self.free_queue.popleft()
            if blk.block_hash is not None:
                self.by_hash.pop(blk.block_hash, None)
                blk.block_hash = None
            blk.ref_cnt = 1
            out.append(blk)
        return out

    def free_slots(self, blocks: List[KVBlock]) -> None:
        for blk in reversed(blocks):
            blk.ref_cnt -= 1
            if blk.ref_cnt == 0:
                self.free_queue.append(blk)

    def allocate_unhashed(self) -> Optional[KVBlock]:
        """One block that caches nothing, so that no prefix is lost."""
        if not self.free_queue:
            return None
        blk = self.free_queue.popleft()  # leak: a hashed block is popped and not requeued
        if blk.block_hash is not None:
            return None
        blk.ref_cnt = 1
        return blk

    def rotate_unhashed(self) -> Optional[KVBlock]:
        for _ in range(len(self.free_queue)):
            blk = self.free_queue.popleft()  # clean: near miss, hashed ones are appended again
            if blk.block_hash is None:
                blk.ref_cnt = 1
                return blk
            self.free_queue.append(blk)
        return None
