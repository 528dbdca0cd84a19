"""Reference counted K/V blocks. A block goes back to the free list when its count falls to zero."""
import threading

import torch


class KVBlock:
    def __init__(self, pool, slot, storage):
        self.pool = pool
        self.slot = slot
        self.storage = storage
        self.refs = 0
        self.step = -1

    def retain(self):
        with self.pool.lock:
            self.refs += 1
        return self

    def drop(self):
        with self.pool.lock:
            self.refs -= 1
            if self.refs == 0:
                self.pool.free.append(self)


class KVPool:
    def __init__(self, n, seq, heads, dim, dtype=torch.bfloat16):
        self.lock = threading.Lock()
        self.free = [
            KVBlock(self, i, torch.empty(2, seq, heads, dim, dtype=dtype, device="cuda")) for i in range(n)
        ]

    def alloc(self):
        """A block with one reference, or None."""
        with self.lock:
            if not self.free:
                return None
            blk = self.free.pop()
            blk.refs = 1
            blk.step = -1
            return blk

    def alloc_double(self):
        """The pair for double buffering."""
        a, b = self.alloc(), self.alloc()  # leak: when only one of the two is available it is lost by the return
        if a is None or b is None:
            return None
        return a, b


class Pinned:
    """`with Pinned(block):` holds one more reference for the block's duration."""

    def __init__(self, block):
        self.block = block

    def __enter__(self):
        return self.block.retain()  # clean: __exit__ drops it

    def __exit__(self, *exc):
        self.block.drop()
        return False
