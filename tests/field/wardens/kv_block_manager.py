from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Optional


@dataclass(eq=False)
class KVBlock:
    block_id: int
    ref_count: int = 0
    block_hash: Optional[int] = None


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.free_queue: deque[KVBlock] = deque(KVBlock(i) for i in range(num_blocks))
        self.cached: OrderedDict[int, KVBlock] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def get_new_blocks(self, n: int) -> Optional[list[KVBlock]]:
        if n > len(self.free_queue):
            return None
        out: list[KVBlock] = []
        for _ in range(n):
            block = self.free_queue.popleft()  # clean: near miss, the evicted hash is dropped and the block is returned
            if block.block_hash is not None:
                self.cached.pop(block.block_hash, None)
                block.block_hash = None
            block.ref_count = 1
            out.append(block)
        return out

    def touch(self, block: KVBlock) -> None:
        if block.ref_count == 0:
            self.free_queue.remove(block)
        block.ref_count += 1

    def free_blocks(self, blocks: list[KVBlock]) -> None:
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_queue.append(block)

    def take_largest_run(self, n: int) -> Optional[list[KVBlock]]:
        run: list[KVBlock] = []
        while self.free_queue and len(run) < n:
            block = self.free_queue.popleft()  # leak: blocks of a broken run are forgotten by the rebinding
            if run and block.block_id != run[-1].block_id + 1:
                run = []
            block.ref_count = 1
            run.append(block)
        if len(run) < n:
            self.free_blocks(run)
            return None
        return run


@dataclass(eq=False)
class Sequence:
    seq_id: int
    tokens: list[int]
    blocks: list[KVBlock] = field(default_factory=list)
    lookahead: list[KVBlock] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


class KVCacheManager:
    def __init__(self, gpu: BlockPool, cpu: BlockPool, block_size: int) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.block_size = block_size
        self.tables: dict[int, Sequence] = {}
        self.swapped: dict[int, list[KVBlock]] = {}

    def _num_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _hit_prefix(self, hashes: list[int]) -> list[KVBlock]:
        hit: list[KVBlock] = []
        for value in hashes:
            block = self.gpu.cached.get(value)
            if block is None:
                break
            self.gpu.touch(block)  # clean: collected in hit and handed to the caller
            hit.append(block)
        return hit

    def cached_tokens(self, hashes: list[int]) -> int:
        hit = self._hit_prefix(hashes)  # leak: only the length is used, the touched blocks are never freed
        return len(hit) * self.block_size

    def allocate(self, seq: Sequence) -> bool:
        hit = self._hit_prefix(seq.hashes)  # leak: refused new blocks return without freeing the hit prefix
        fresh = self.gpu.get_new_blocks(self._num_blocks(len(seq.tokens)) - len(hit))  # clean: near miss, None means nothing held, else kept by the sequence
        if fresh is None:
            return False
        seq.blocks = hit + fresh
        for value, block in zip(seq.hashes, seq.blocks):
            block.block_hash = value
            self.gpu.cached[value] = block
        self.tables[seq.seq_id] = seq
        return True

    def can_admit(self, seq: Sequence, watermark: int) -> bool:
        hit = self._hit_prefix(seq.hashes)  # clean: near miss, freed before the answer
        need = self._num_blocks(len(seq.tokens)) - len(hit)
        enough = self.gpu.num_free - need >= watermark
        self.gpu.free_blocks(hit)
        return enough

    def append_slots(self, seq: Sequence, new_tokens: int) -> bool:
        need = self._num_blocks(len(seq.tokens) + new_tokens) - len(seq.blocks)
        if need > 0:
            fresh = self.gpu.get_new_blocks(need)  # clean: near miss, None-checked and added to the sequence's blocks
            if fresh is None:
                return False
            seq.blocks.extend(fresh)
        return True

    def reserve_lookahead(self, seq: Sequence, n: int) -> bool:
        if seq.lookahead:
            return True
        fresh = self.gpu.get_new_blocks(n)  # leak: swap_out() frees only blocks and clears lookahead
        if fresh is None:
            return False
        seq.lookahead = fresh
        return True

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        keep = seq.lookahead[:accepted]
        self.gpu.free_blocks(seq.lookahead[accepted:])
        seq.blocks.extend(keep)
        seq.lookahead = []

    def fork(self, parent: Sequence, child_id: int) -> Sequence:
        for block in parent.blocks:
            self.gpu.touch(block)  # clean: near miss, the child holds the same blocks and free() drops its counts
        child = Sequence(child_id, list(parent.tokens), list(parent.blocks), hashes=list(parent.hashes))
        self.tables[child_id] = child
        return child

    def copy_on_write(self, seq: Sequence) -> Optional[tuple[int, int]]:
        last = seq.blocks[-1]
        if last.ref_count == 1:
            return None
        fresh = self.gpu.get_new_blocks(1)  # clean: near miss, replaces the shared block, whose count is dropped
        if fresh is None:
            return None
        seq.blocks[-1] = fresh[0]
        self.gpu.free_blocks([last])
        return last.block_id, fresh[0].block_id

    def swap_out(self, seq: Sequence) -> bool:
        if seq.seq_id in self.swapped:
            return False
        host = self.cpu.get_new_blocks(len(seq.blocks))  # clean: near miss, kept in swapped, swap_in or free gives it back
        if host is None:
            return False
        self.swapped[seq.seq_id] = host
        self.gpu.free_blocks(seq.blocks)
        seq.blocks = []
        seq.lookahead = []
        return True

    def swap_in(self, seq: Sequence) -> bool:
        host = self.swapped[seq.seq_id]
        fresh = self.gpu.get_new_blocks(len(host))  # clean: near miss, moves into seq.blocks, which is empty after swap_out
        if fresh is None:
            return False
        seq.blocks = fresh
        self.cpu.free_blocks(self.swapped.pop(seq.seq_id))
        return True

    def free(self, seq_id: int) -> None:
        seq = self.tables.pop(seq_id, None)
        if seq is None:
            return
        self.gpu.free_blocks(seq.blocks)
        self.gpu.free_blocks(seq.lookahead)
        seq.blocks, seq.lookahead = [], []
        host = self.swapped.pop(seq_id, None)
        if host is not None:
            self.cpu.free_blocks(host)

    def defragment(self, seq: Sequence) -> bool:
        run = self.gpu.take_largest_run(len(seq.blocks))  # clean: near miss, swapped for the old blocks, which are freed
        if run is None:
            return False
        old, seq.blocks = seq.blocks, run
        self.gpu.free_blocks(old)
        return True
