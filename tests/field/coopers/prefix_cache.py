"""Block-granular prefix cache with per-block reference counts."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Sequence

logger = logging.getLogger(__name__)


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    digest: int | None = None


class BlockPool:
    """Owns every block; blocks with ref_cnt == 0 stay in the free queue and remain hittable."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_queue: deque[Block] = deque(self.blocks)
        self.by_digest: dict[int, Block] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def new_block(self) -> Block | None:
        if not self.free_queue:
            return None
        block = self.free_queue.popleft()
        if block.digest is not None:
            self.by_digest.pop(block.digest, None)
            block.digest = None
        block.ref_cnt = 1
        return block

    def new_blocks(self, n: int) -> list[Block] | None:
        if len(self.free_queue) < n:
            return None
        out: list[Block] = []
        for _ in range(n):
            block = self.new_block()  # clean: appended to the list handed to the caller
            assert block is not None
            out.append(block)
        return out

    def touch(self, digest: int) -> Block | None:
        block = self.by_digest.get(digest)
        if block is None:
            return None
        if block.ref_cnt == 0:
            self.free_queue.remove(block)
        block.ref_cnt += 1
        return block

    def retain(self, block: Block) -> Block:
        block.ref_cnt += 1
        return block

    def put(self, block: Block) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            self.free_queue.append(block)

    def put_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.put(block)

    def publish(self, block: Block, digest: int) -> None:
        if block.digest is None and digest not in self.by_digest:
            block.digest = digest
            self.by_digest[digest] = block


@dataclass
class SeqState:
    seq_id: str
    digests: list[int]
    num_blocks: int
    blocks: list[Block] = field(default_factory=list)


class PrefixCacheManager:
    def __init__(self, pool: BlockPool, block_size: int = 16, watermark: int = 4) -> None:
        self.pool = pool
        self.block_size = block_size
        self.watermark = watermark
        self.seqs: dict[str, SeqState] = {}
        self.system_prompts: dict[str, list[Block]] = {}

    def match_prefix(self, digests: Sequence[int]) -> list[Block]:
        matched: list[Block] = []
        for digest in digests:
            block = self.pool.touch(digest)  # clean: collected in the list that the caller gets
            if block is None:
                break
            matched.append(block)
        return matched

    def cached_tokens(self, digests: Sequence[int]) -> int:
        hits = self.match_prefix(digests)  # leak: only the count is used, the touched blocks keep their references
        return len(hits) * self.block_size

    def estimate_new_blocks(self, seq: SeqState) -> int:
        hits = self.match_prefix(seq.digests)  # clean: near miss, only counted too but put back right away
        need = seq.num_blocks - len(hits)
        self.pool.put_all(reversed(hits))
        return max(need, 0)

    def allocate(self, seq: SeqState) -> bool:
        if seq.seq_id in self.seqs:
            return True
        matched = self.match_prefix(seq.digests)  # leak: when the pool cannot supply the rest, the matched blocks are dropped
        need = max(seq.num_blocks - len(matched), 0)
        fresh = self.pool.new_blocks(need)  # clean: near miss, None means nothing was taken, else kept in seq.blocks until free()
        if fresh is None:
            logger.debug("seq %s: %d blocks needed, %d free", seq.seq_id, need, self.pool.num_free)
            return False
        seq.blocks = matched + fresh
        self.seqs[seq.seq_id] = seq
        return True

    def append_block(self, seq: SeqState) -> bool:
        if self.pool.num_free <= self.watermark:
            return False
        block = self.pool.new_block()  # clean: appended to the sequence, returned in free()
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def commit_block(self, seq: SeqState, idx: int, digest: int) -> None:
        old = seq.blocks[idx]
        twin = self.pool.touch(digest)  # clean: near miss, either swapped into the sequence or put back when it is the same block
        if twin is None:
            self.pool.publish(old, digest)
            return
        if twin is not old:
            seq.blocks[idx] = twin
            self.pool.put(old)
        else:
            self.pool.put(twin)

    def copy_on_write(self, seq: SeqState, idx: int) -> tuple[int, int] | None:
        src = seq.blocks[idx]
        if src.ref_cnt == 1:
            return None
        dst = self.pool.new_block()  # clean: takes the place of the shared block in the sequence
        if dst is None:
            return None
        seq.blocks[idx] = dst
        self.pool.put(src)
        return src.block_id, dst.block_id

    def fork(self, parent: SeqState, child_id: str) -> SeqState | None:
        if child_id in self.seqs:
            return None
        shared = [self.pool.retain(b) for b in parent.blocks[:-1]]  # leak: no tail block available, and the shared references are lost
        tail = self.pool.new_block()  # clean: becomes the last block of the child
        if tail is None:
            logger.info("fork of %s postponed", parent.seq_id)
            return None
        child = SeqState(child_id, list(parent.digests), parent.num_blocks, shared + [tail])
        self.seqs[child_id] = child
        return child

    def free(self, seq_id: str) -> None:
        seq = self.seqs.pop(seq_id, None)
        if seq is None:
            return
        self.pool.put_all(reversed(seq.blocks))
        seq.blocks = []

    def pin_system_prompt(self, tenant: str, digests: Sequence[int]) -> int:
        self.system_prompts[tenant] = self.match_prefix(digests)  # leak: pinning a tenant again overwrites the blocks of the earlier pin
        return len(self.system_prompts[tenant])

    def unpin_system_prompt(self, tenant: str) -> None:
        self.pool.put_all(self.system_prompts.pop(tenant, []))
