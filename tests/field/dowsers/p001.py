"""Paged KV-cache blocks, handed out as lists of block ids."""
from collections import deque


class BlockAllocator:
    def __init__(self, num_blocks, block_size=16):
        self.block_size = block_size
        self._free = deque(range(num_blocks))

    @property
    def num_free(self):
        return len(self._free)

    def blocks_for(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def allocate(self, count):
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} free")
        return [self._free.popleft() for _ in range(count)]

    def free(self, blocks):
        self._free.extend(blocks)


class PrefillWorker:
    def __init__(self, allocator: BlockAllocator, model):
        self.allocator = allocator
        self.model = model
        self.tables = {}

    def prefill(self, req):
        need = self.allocator.blocks_for(len(req.tokens))
        blocks = self.allocator.allocate(need)  # leak: returns early when the request was cancelled
        if req.cancelled:
            return None
        logits = self.model.forward(req.tokens, blocks)
        self.tables[req.id] = blocks
        return logits

    def finish(self, req_id):
        self.allocator.free(self.tables.pop(req_id))

    def score(self, tokens):
        blocks = self.allocator.allocate(self.allocator.blocks_for(len(tokens)))  # clean: try/finally
        try:
            return self.model.score(tokens, blocks)
        finally:
            self.allocator.free(blocks)

    def warmup(self):
        for count in (1, 8, 64):
            blocks = self.allocator.allocate(count)  # leak: overwritten by the next turn of the loop
            self.model.forward([0] * count * self.allocator.block_size, blocks)
        self.allocator.free(blocks)

    def fork(self, req, child_id):
        blocks = self.allocator.allocate(len(self.tables[req.id]))  # clean: stored, finish() frees it
        self.model.copy_blocks(self.tables[req.id], blocks)
        self.tables[child_id] = blocks
