"""Paged KV block manager with prefix sharing."""
from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional


@dataclass
class Block:
    block_id: int
    ref: int = 0
    digest: Optional[bytes] = None


@dataclass
class Sequence:
    seq_id: str
    tokens: List[int]
    table: List[Block] = field(default_factory=list)
    lookahead: List[Block] = field(default_factory=list)
    swapped: bool = False


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self._free: Deque[Block] = deque(Block(i) for i in range(num_blocks))
        self._by_digest: Dict[bytes, Block] = {}

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.ref = 1
        return block

    def lookup(self, digest: bytes) -> Optional[Block]:
        """Returns a shared block with its count raised."""
        block = self._by_digest.get(digest)
        if block is None:
            return None
        block.ref += 1
        return block

    def publish(self, block: Block, digest: bytes) -> None:
        block.digest = digest
        self._by_digest[digest] = block

    def free(self, block: Block) -> None:
        block.ref -= 1
        if block.ref == 0:
            if block.digest is not None:
                self._by_digest.pop(block.digest, None)
                block.digest = None
            self._free.append(block)


def chain_digest(prev: bytes, tokens: List[int]) -> bytes:
    return hashlib.sha256(prev + repr(tokens).encode()).digest()


class KVBlockManager:
    def __init__(self, gpu_blocks: int, cpu_blocks: int, block_size: int, watermark: int = 4) -> None:
        self.gpu = BlockPool(gpu_blocks)
        self.cpu = BlockPool(cpu_blocks)
        self.block_size = block_size
        self.watermark = watermark
        self.sequences: Dict[str, Sequence] = {}

    def _match_prefix(self, tokens: List[int]) -> List[Block]:
        matched: List[Block] = []
        digest = b""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            digest = chain_digest(digest, tokens[start:start + self.block_size])
            block = self.gpu.lookup(digest)  # clean: collected in matched, which the caller owns
            if block is None:
                break
            matched.append(block)
        return matched

    def count_cached_tokens(self, tokens: List[int]) -> int:
        matched = self._match_prefix(tokens)  # leak: only the length is used, the raised counts are never lowered
        return len(matched) * self.block_size

    def has_cached_head(self, tokens: List[int]) -> bool:
        head = self.gpu.lookup(chain_digest(b"", tokens[:self.block_size]))  # clean: near miss, a probe that lowers the count again when it hit
        if head is None:
            return False
        self.gpu.free(head)
        return True

    def admit(self, seq: Sequence) -> bool:
        need = -(-len(seq.tokens) // self.block_size)
        matched = self._match_prefix(seq.tokens)  # leak: the early return on low memory drops the matched blocks
        missing = need - len(matched)
        if self.gpu.num_free() - missing < self.watermark:
            return False
        seq.table = matched
        for _ in range(missing):
            block = self.gpu.allocate()  # clean: near miss, None returns through release_table that frees the whole table
            if block is None:
                self._release_table(seq)
                return False
            seq.table.append(block)
        self.sequences[seq.seq_id] = seq
        return True

    def seal(self, seq: Sequence) -> None:
        digest = b""
        for i in range(len(seq.tokens) // self.block_size):
            start = i * self.block_size
            digest = chain_digest(digest, seq.tokens[start:start + self.block_size])
            if seq.table[i].digest is None:
                self.gpu.publish(seq.table[i], digest)

    def append_slot(self, seq: Sequence) -> bool:
        if len(seq.tokens) <= len(seq.table) * self.block_size:
            return True
        block = self.gpu.allocate()  # clean: joins the sequence table, freed in finish
        if block is None:
            return False
        seq.table.append(block)
        return True

    def reserve_lookahead(self, seq: Sequence, k: int) -> int:
        got = 0
        for _ in range(k):
            block = self.gpu.allocate()  # leak: abort() frees the table but forgets the lookahead list
            if block is None:
                break
            seq.lookahead.append(block)
            got += 1
        return got

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        seq.table.extend(seq.lookahead[:accepted])
        for block in seq.lookahead[accepted:]:
            self.gpu.free(block)
        seq.lookahead = []

    def copy_on_write(self, seq: Sequence, index: int) -> Optional[Block]:
        old = seq.table[index]
        if old.ref == 1:
            return old
        fresh = self.gpu.allocate()  # clean: near miss, put into the table in place of the shared one
        if fresh is None:
            return None
        seq.table[index] = fresh
        self.gpu.free(old)
        return fresh

    def swap_out(self, seq: Sequence) -> bool:
        targets: List[Block] = []
        for _ in seq.table:
            block = self.cpu.allocate()  # leak: when the CPU pool runs dry the ones taken so far are dropped
            if block is None:
                return False
            targets.append(block)
        self._release_table(seq)
        seq.table = targets
        seq.swapped = True
        return True

    def swap_in(self, seq: Sequence) -> bool:
        if self.gpu.num_free() < len(seq.table):
            return False
        targets: List[Block] = []
        for _ in seq.table:
            block = self.gpu.allocate()  # clean: near miss, taken blocks are freed before the failure return
            if block is None:
                for taken in targets:
                    self.gpu.free(taken)
                return False
            targets.append(block)
        for old in seq.table:
            self.cpu.free(old)
        seq.table = targets
        seq.swapped = False
        return True

    def fork(self, parent: Sequence, child_id: str) -> Sequence:
        child = Sequence(child_id, list(parent.tokens))
        for block in parent.table:
            block.ref += 1
            child.table.append(block)
        self.sequences[child_id] = child
        return child

    def _release_table(self, seq: Sequence) -> None:
        pool = self.cpu if seq.swapped else self.gpu
        for block in seq.table:
            pool.free(block)
        seq.table = []

    def finish(self, seq_id: str) -> None:
        seq = self.sequences.pop(seq_id)
        self.commit_lookahead(seq, 0)
        self._release_table(seq)

    def abort(self, seq_id: str) -> None:
        seq = self.sequences.pop(seq_id, None)
        if seq is None:
            return
        self._release_table(seq)
