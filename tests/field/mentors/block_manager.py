"""Paged KV block manager with prefix caching, copy-on-write and host swap."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class NoFreeBlocks(RuntimeError):
    pass


@dataclass(slots=True)
class KVBlock:
    block_id: int
    ref_cnt: int = 0
    block_hash: int | None = None


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int]
    block_hashes: list[int] = field(default_factory=list)


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.free_queue: deque[KVBlock] = deque(self.blocks)
        self.cached: dict[int, KVBlock] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def allocate(self) -> KVBlock:
        if not self.free_queue:
            raise NoFreeBlocks("no free KV blocks")
        block = self.free_queue.popleft()
        if block.block_hash is not None:
            self.cached.pop(block.block_hash, None)
            block.block_hash = None
        block.ref_cnt = 1
        return block

    def allocate_n(self, n: int) -> list[KVBlock] | None:
        if self.num_free < n:
            return None
        return [self.allocate() for _ in range(n)]  # clean: the list goes to the caller, and the count was checked before

    def touch(self, block: KVBlock) -> None:
        if block.ref_cnt == 0:
            self.free_queue.remove(block)
        block.ref_cnt += 1

    def free(self, block: KVBlock) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            self.free_queue.append(block)

    def lookup(self, block_hash: int) -> KVBlock | None:
        block = self.cached.get(block_hash)
        if block is not None:
            self.touch(block)  # clean: the reference is the returned block's
        return block

    def publish(self, block: KVBlock, block_hash: int) -> None:
        if block_hash not in self.cached:
            block.block_hash = block_hash
            self.cached[block_hash] = block


class BlockManager:
    def __init__(self, num_gpu: int, num_cpu: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self.gpu = BlockPool(num_gpu)
        self.cpu = BlockPool(num_cpu)
        self.tables: dict[int, list[KVBlock]] = {}
        self.swapped: dict[int, list[KVBlock]] = {}
        self.lookahead: dict[int, list[KVBlock]] = {}
        self.pending_copies: list[tuple[int, int]] = []

    def blocks_needed(self, seq: Sequence) -> int:
        return -(-len(seq.token_ids) // self.block_size)

    def match_prefix(self, seq: Sequence) -> list[KVBlock]:
        matched: list[KVBlock] = []
        for h in seq.block_hashes:
            block = self.gpu.lookup(h)  # clean: appended to the list that the caller gets, or None
            if block is None:
                break
            matched.append(block)
        return matched

    def estimate_hit_rate(self, seq: Sequence) -> float:
        if not seq.block_hashes:
            return 0.0
        hits = sum(1 for h in seq.block_hashes if self.gpu.lookup(h) is not None)  # leak: lookup takes a reference on each hit and the probe only counts
        return hits / len(seq.block_hashes)

    def allocate_sequence(self, seq: Sequence) -> bool:
        matched = self.match_prefix(seq)  # leak: not released when the fresh blocks cannot be had
        fresh = self.gpu.allocate_n(self.blocks_needed(seq) - len(matched))  # clean: goes into the table
        if fresh is None:
            return False
        for block, h in zip(fresh, seq.block_hashes[len(matched):]):
            self.gpu.publish(block, h)
        self.tables[seq.seq_id] = matched + fresh
        return True

    def fork(self, parent_id: int, child_id: int) -> None:
        table = self.tables[parent_id]
        for block in table:
            self.gpu.touch(block)  # clean: child table owns one reference per block
        self.tables[child_id] = list(table)

    def append_slot(self, seq: Sequence) -> bool:
        table = self.tables[seq.seq_id]
        if len(seq.token_ids) > len(table) * self.block_size:
            spare = self.lookahead.get(seq.seq_id)
            if spare:
                table.append(spare.pop(0))
                return True
            if not self.gpu.num_free:
                return False
            table.append(self.gpu.allocate())  # clean: owned by the table
            return True
        last = table[-1]
        if last.ref_cnt > 1:
            if not self.gpu.num_free:
                return False
            block = self.gpu.allocate()  # leak: replaces the shared block in the table, whose reference is not dropped
            self.pending_copies.append((last.block_id, block.block_id))
            table[-1] = block
        return True

    def privatize(self, seq_id: int) -> int:
        table = self.tables[seq_id]
        copied = 0
        for i, shared in enumerate(table):
            if shared.ref_cnt == 1 or not self.gpu.num_free:
                continue
            own = self.gpu.allocate()  # clean: near miss, the block it replaces is freed
            self.pending_copies.append((shared.block_id, own.block_id))
            table[i] = own
            self.gpu.free(shared)
            copied += 1
        return copied

    def reserve_lookahead(self, seq_id: int, k: int) -> bool:
        if seq_id in self.lookahead:
            return True
        blocks = self.gpu.allocate_n(k)  # leak: free_sequence drops what is left of the lookahead list without freeing it
        if blocks is None:
            return False
        self.lookahead[seq_id] = blocks
        return True

    def grow(self, seq_id: int, extra: int) -> bool:
        got: list[KVBlock] = []
        try:
            for _ in range(extra):
                got.append(self.gpu.allocate())  # clean: near miss, the partial list is freed in the handler
        except NoFreeBlocks:
            for block in got:
                self.gpu.free(block)
            return False
        self.tables[seq_id].extend(got)
        return True

    def swap_out(self, seq_id: int) -> list[tuple[int, int]] | None:
        table = self.tables[seq_id]
        host = self.cpu.allocate_n(len(table))  # clean: None or kept in swapped, which swap_in and free_sequence empty
        if host is None:
            return None
        moves = [(g.block_id, c.block_id) for g, c in zip(table, host)]
        self.swapped[seq_id] = host
        for block in self.tables.pop(seq_id):
            self.gpu.free(block)
        return moves

    def swap_in(self, seq_id: int) -> list[tuple[int, int]] | None:
        host = self.swapped[seq_id]
        device = self.gpu.allocate_n(len(host))  # clean: becomes the table
        if device is None:
            return None
        del self.swapped[seq_id]
        moves: list[tuple[int, int]] = []
        for src, dst in zip(host, device):
            moves.append((src.block_id, dst.block_id))
            self.cpu.free(src)
        self.tables[seq_id] = device
        return moves

    def free_sequence(self, seq_id: int) -> None:
        for block in reversed(self.tables.pop(seq_id, [])):
            self.gpu.free(block)
        for block in self.swapped.pop(seq_id, []):
            self.cpu.free(block)
        self.lookahead.pop(seq_id, None)
