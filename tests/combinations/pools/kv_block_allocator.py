# take: P.allocate_block()
# give: P.free_block(X)
# gets: value
# type: NaiveBlockAllocator
from collections import deque


class KVBlock:
    __slots__ = ("block_id", "ref_cnt", "device")

    def __init__(self, block_id, device):
        self.block_id = block_id
        self.device = device
        self.ref_cnt = 0


class NoFreeBlocksError(ValueError):
    pass


class NaiveBlockAllocator:
    """Hands out fixed-size KV blocks without prefix sharing."""

    def __init__(self, num_blocks, device="cuda"):
        self.num_blocks = num_blocks
        self._free = deque(KVBlock(i, device) for i in range(num_blocks))

    def allocate_block(self):
        if not self._free:
            raise NoFreeBlocksError("Out of memory! No free blocks are available.")
        block = self._free.popleft()
        block.ref_cnt = 1
        return block

    def free_block(self, block):
        if block.ref_cnt == 0:
            raise ValueError(f"Double free! {block.block_id} is already freed.")
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            self._free.append(block)

    def get_num_free_blocks(self):
        return len(self._free)
