"""Block manager of the inference server: paged KV cache with reference counts."""
from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    """Lowest-index-first allocator over a fixed number of cache blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._heap = list(range(num_blocks))
        heapq.heapify(self._heap)
        self._refs: dict[int, int] = {}

    def num_free(self) -> int:
        return len(self._heap)

    def allocate(self) -> int:
        if not self._heap:
            raise OutOfBlocks("no free kv block")
        idx = heapq.heappop(self._heap)  # clean: handed to the caller
        self._refs[idx] = 1
        return idx

    def allocate_many(self, n: int) -> list[int] | None:
        if n > len(self._heap):
            return None
        out = []
        for _ in range(n):
            out.append(self.allocate())  # clean: list is returned
        return out

    def incref(self, idx: int) -> int:
        self._refs[idx] += 1
        return idx

    def free(self, idx: int) -> None:
        self._refs[idx] -= 1
        if self._refs[idx] == 0:
            del self._refs[idx]
            heapq.heappush(self._heap, idx)

    def free_all(self, blocks: list[int]) -> None:
        for idx in blocks:
            self.free(idx)

    def refcount(self, idx: int) -> int:
        return self._refs.get(idx, 0)


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    parent: int | None = None


class BlockManager:
    def __init__(self, allocator: BlockAllocator, cache: torch.Tensor, watermark: int = 4, max_table: int = 512) -> None:
        self.allocator = allocator
        self.cache = cache
        self.watermark = watermark
        self.max_table = max_table
        self.running: dict[int, Sequence] = {}

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.allocator.block_size)

    def admit(self, seq: Sequence) -> bool:
        if seq.seq_id in self.running:
            return True
        blocks = self.allocator.allocate_many(self._blocks_for(len(seq.tokens)))  # leak: below the watermark it returns False with the blocks in hand
        if blocks is None:
            return False
        if self.allocator.num_free() < self.watermark:
            return False
        seq.table.extend(blocks)
        self.running[seq.seq_id] = seq
        return True

    def append_token(self, seq: Sequence, token: int) -> bool:
        seq.tokens.append(token)
        if len(seq.tokens) > len(seq.table) * self.allocator.block_size:
            if not self.allocator.num_free():
                seq.tokens.pop()
                return False
            seq.table.append(self.allocator.allocate())  # clean: goes to the table freed by finish
        return True

    def fork(self, parent: Sequence, child_id: int) -> Sequence:
        if child_id in self.running:
            raise KeyError(f"sequence {child_id} is running")
        child = Sequence(child_id, list(parent.tokens), parent=parent.seq_id)
        for idx in parent.table:
            child.table.append(self.allocator.incref(idx))  # clean: near miss, the extra reference is dropped by finish(child)
        self.running[child_id] = child
        return child

    def copy_on_write(self, seq: Sequence) -> int:
        last = seq.table[-1]
        if self.allocator.refcount(last) == 1:
            return last
        fresh = self.allocator.allocate()  # clean: near miss, replaces last, whose reference is dropped
        self.cache[fresh].copy_(self.cache[last])
        seq.table[-1] = fresh
        self.allocator.free(last)
        return fresh

    def compact_tail(self, seq: Sequence) -> None:
        """Move the last block to a lower index if one is free."""
        last = seq.table[-1]
        fresh = self.allocator.allocate()  # leak: when fresh is not lower it is neither used nor freed
        if fresh < last:
            self.cache[fresh].copy_(self.cache[last])
            seq.table[-1] = fresh
            self.allocator.free(last)

    def swap_in(self, seq: Sequence, host: torch.Tensor) -> bool:
        if seq.seq_id in self.running:
            return False
        blocks = self.allocator.allocate_many(host.shape[0])  # clean: given to the sequence
        if blocks is None:
            return False
        self.cache[torch.tensor(blocks)] = host.to(self.cache.device)
        seq.table.extend(blocks)
        self.running[seq.seq_id] = seq
        return True

    def swap_out(self, seq: Sequence) -> torch.Tensor:
        host = self.cache[torch.tensor(seq.table)].cpu()
        self.allocator.free_all(seq.table)
        seq.table = []
        self.running.pop(seq.seq_id, None)
        return host

    def snapshot_prefix(self, seq: Sequence, n: int) -> torch.Tensor:
        pinned = [self.allocator.incref(idx) for idx in seq.table[:n]]  # leak: only the first pinned block is released
        out = self.cache[torch.tensor(pinned)].clone()
        self.allocator.free(pinned[0])
        return out

    def beam_scores(self, seqs: list[Sequence], head: torch.Tensor) -> list[float]:
        scratch = self.allocator.allocate()  # clean: freed after the loop, break included
        scores: list[float] = []
        for seq in seqs:
            if not seq.table:
                break
            self.cache[scratch].copy_(self.cache[seq.table[-1]])
            scores.append(float((self.cache[scratch] * head).sum()))
        self.allocator.free(scratch)
        return scores

    def reserve_lookahead(self, seq: Sequence, n: int) -> int:
        blocks = self.allocator.allocate_many(n)  # leak: the blocks cut off by the slice are neither kept nor freed
        if blocks is None:
            return 0
        blocks = blocks[: max(0, self.max_table - len(seq.table))]
        seq.table.extend(blocks)
        return len(blocks)

    def count_zeroed(self, n: int) -> int:
        blocks = self.allocator.allocate_many(n) or []  # leak: the early return leaves this and the remaining blocks allocated
        for pos, idx in enumerate(blocks):
            if self.cache[idx].any():
                return pos
            self.allocator.free(idx)
        return len(blocks)

    def finish(self, seq_id: int) -> None:
        seq = self.running.pop(seq_id, None)
        if seq is None:
            return
        self.allocator.free_all(seq.table)
        seq.table = []
