"""Paged KV block manager with prefix sharing, copy-on-write and CPU swap."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

logger = logging.getLogger(__name__)


@dataclass
class Block:
    block_id: int
    ref: int = 0
    digest: Optional[int] = None


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    block_size: int
    table: list[Block] = field(default_factory=list)
    lookahead: list[Block] = field(default_factory=list)
    cpu_table: list[Block] = field(default_factory=list)

    def num_blocks(self) -> int:
        return (len(self.tokens) + self.block_size - 1) // self.block_size

    def digests(self) -> list[int]:
        full = len(self.tokens) // self.block_size
        return [hash(tuple(self.tokens[: (i + 1) * self.block_size])) for i in range(full)]


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_ids: deque[int] = deque(range(num_blocks))
        self.by_digest: dict[int, int] = {}

    def num_free(self) -> int:
        return len(self.free_ids)

    def allocate(self) -> Optional[Block]:
        if not self.free_ids:
            return None
        block = self.blocks[self.free_ids.popleft()]
        if block.digest is not None:
            self.by_digest.pop(block.digest, None)
            block.digest = None
        block.ref = 1
        return block

    def share(self, digest: int) -> Optional[Block]:
        block_id = self.by_digest.get(digest)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        if block.ref == 0:
            self.free_ids.remove(block_id)
        block.ref += 1
        return block

    def retain(self, block: Block) -> None:
        block.ref += 1

    def release(self, block: Block) -> None:
        block.ref -= 1
        if block.ref == 0:
            self.free_ids.append(block.block_id)

    def seal(self, block: Block, digest: int) -> None:
        block.digest = digest
        self.by_digest.setdefault(digest, block.block_id)

    def allocate_many(self, n: int) -> Optional[list[Block]]:
        got: list[Block] = []
        for _ in range(n):
            block = self.allocate()  # leak: when the pool runs dry midway, the blocks already in got are dropped
            if block is None:
                return None
            got.append(block)
        return got


class KVBlockManager:
    def __init__(self, num_gpu: int, num_cpu: int, watermark: int = 2) -> None:
        self.gpu = BlockPool(num_gpu)
        self.cpu = BlockPool(num_cpu)
        self.watermark = watermark
        self.system_prompt: list[Block] = []

    def can_append(self, seq: Sequence) -> bool:
        return self.gpu.num_free() > self.watermark

    def pin_system_prompt(self, digests: list[int]) -> int:
        for digest in digests:
            block = self.gpu.share(digest)  # clean: kept on purpose in system_prompt, given back by unpin_system_prompt
            if block is None:
                break
            self.system_prompt.append(block)
        return len(self.system_prompt)

    def unpin_system_prompt(self) -> None:
        while self.system_prompt:
            self.gpu.release(self.system_prompt.pop())

    def allocate_prompt(self, seq: Sequence) -> bool:
        shared: list[Block] = []
        for digest in seq.digests():
            block = self.gpu.share(digest)  # leak: return False below forgets the shared prefix
            if block is None:
                break
            shared.append(block)
        fresh = self.gpu.allocate_many(seq.num_blocks() - len(shared))  # clean: moves into the table, freed by free()
        if fresh is None:
            logger.debug("seq %d waits for blocks", seq.seq_id)
            return False
        seq.table = shared + fresh
        for block, digest in zip(seq.table, seq.digests()):
            if block.digest is None:
                self.gpu.seal(block, digest)
        return True

    def append_slot(self, seq: Sequence) -> Optional[tuple[int, int]]:
        if seq.num_blocks() > len(seq.table):
            block = self.gpu.allocate()  # clean: None-checked and appended to the table
            if block is None:
                raise RuntimeError("append_slot called without can_append")
            seq.table.append(block)
            return None
        last = seq.table[-1]
        if last.ref == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, replaces the shared tail whose reference is dropped just below
        if fresh is None:
            raise RuntimeError("append_slot called without can_append")
        seq.table[-1] = fresh
        self.gpu.release(last)
        return last.block_id, fresh.block_id

    def reserve_lookahead(self, seq: Sequence, k: int) -> int:
        for _ in range(k):
            block = self.gpu.allocate()  # leak: a sequence that finishes with unused lookahead never returns it, free() only walks the table
            if block is None:
                break
            seq.lookahead.append(block)
        return len(seq.lookahead)

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        seq.table.extend(seq.lookahead[:accepted])
        del seq.lookahead[:accepted]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        for block in parent.table:
            self.gpu.retain(block)  # clean: near miss, the child's table holds the reference and free(child) drops it
        child.table = list(parent.table)

    def swap_out(self, seq: Sequence) -> Optional[dict[int, int]]:
        mapping: dict[int, int] = {}
        taken: list[Block] = []
        for block in seq.table:
            host = self.cpu.allocate()  # clean: near miss, a partial swap is rolled back from taken
            if host is None:
                for other in taken:
                    self.cpu.release(other)
                return None
            taken.append(host)
            mapping[block.block_id] = host.block_id
        for block in seq.table:
            self.gpu.release(block)
        seq.cpu_table, seq.table = taken, []
        return mapping

    def swap_in(self, seq: Sequence) -> Optional[dict[int, int]]:
        if self.gpu.num_free() < len(seq.cpu_table) + self.watermark:
            return None
        fresh = self.gpu.allocate_many(len(seq.cpu_table))  # clean: enough blocks are free, they become the table
        if fresh is None:
            return None
        mapping = {h.block_id: d.block_id for h, d in zip(seq.cpu_table, fresh)}
        for host in seq.cpu_table:
            self.cpu.release(host)
        seq.table, seq.cpu_table = fresh, []
        return mapping

    def probe_prefix(self, seq: Sequence) -> int:
        hits = 0
        for digest in seq.digests():
            block = self.gpu.share(digest)  # clean: near miss, only probes and drops the reference at once
            if block is None:
                return hits
            hits += 1
            self.gpu.release(block)
        return hits

    def warm_prefix(self, digests: list[int]) -> float:
        if not digests:
            return 0.0
        hit = sum(1 for d in digests if self.gpu.share(d) is not None)  # leak: each hit takes a reference that only counts
        return hit / len(digests)

    def free(self, seq: Sequence) -> None:
        for block in reversed(seq.table):
            self.gpu.release(block)
        seq.table.clear()
        for host in seq.cpu_table:
            self.cpu.release(host)
        seq.cpu_table.clear()
