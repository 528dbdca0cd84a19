"""Paged KV block manager: one instance per engine, driven by the scheduler thread."""
from __future__ import annotations

import hashlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

log = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


@dataclass
class Block:
    idx: int
    ref: int = 0
    digest: Optional[bytes] = None


def chain_digests(tokens: Sequence[int], block_size: int) -> List[bytes]:
    out, parent = [], b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        h = hashlib.blake2b(parent, digest_size=16)
        h.update(repr(tuple(tokens[start:start + block_size])).encode())
        parent = h.digest()
        out.append(parent)
    return out


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: Deque[Block] = deque(self.blocks)
        self._by_digest: Dict[bytes, Block] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        blk = self._free.popleft()  # clean: returned to the caller with one reference
        if blk.digest is not None:
            self._by_digest.pop(blk.digest, None)
            blk.digest = None
        blk.ref = 1
        return blk

    def lookup(self, digest: bytes) -> Optional[Block]:
        blk = self._by_digest.get(digest)
        if blk is None:
            return None
        if blk.ref == 0:
            self._free.remove(blk)
        blk.ref += 1
        return blk

    def share(self, blk: Block) -> Block:
        blk.ref += 1
        return blk

    def seal(self, blk: Block, digest: bytes) -> None:
        blk.digest = digest
        self._by_digest[digest] = blk

    def free(self, blk: Block) -> None:
        blk.ref -= 1
        if blk.ref == 0:
            self._free.append(blk)


class BlockManager:
    def __init__(self, gpu_blocks: int, cpu_blocks: int, block_size: int = 16, max_seqs: int = 256) -> None:
        self.gpu = BlockAllocator(gpu_blocks, block_size)
        self.cpu = BlockAllocator(cpu_blocks, block_size)
        self.block_size = block_size
        self.max_seqs = max_seqs
        self.tables: Dict[int, List[Block]] = {}
        self.swapped: Dict[int, List[Block]] = {}
        self.copies: List[Tuple[int, int]] = []

    def allocate_prompt(self, seq_id: int, tokens: Sequence[int]) -> bool:
        hits: List[Block] = []
        fresh: List[Block] = []
        for digest in chain_digests(tokens, self.block_size):
            blk = self.gpu.lookup(digest)  # leak: the hits keep their reference when fresh blocks run out
            if blk is None:
                break
            hits.append(blk)
        need = -(-len(tokens) // self.block_size) - len(hits)
        for _ in range(need):
            blk = self.gpu.allocate()  # clean: rolled back from fresh, or owned by the table
            if blk is None:
                for b in fresh:
                    self.gpu.free(b)
                return False
            fresh.append(blk)
        self.tables[seq_id] = hits + fresh
        return True

    def append_slot(self, seq_id: int, pos: int) -> bool:
        table = self.tables[seq_id]
        if pos // self.block_size >= len(table):
            blk = self.gpu.allocate()  # clean: appended to the sequence's table
            if blk is None:
                return False
            table.append(blk)
            return True
        last = table[-1]
        if last.ref == 1:
            return True
        dst = self.gpu.allocate()  # clean: near miss, replaces the shared block in the table, which is freed
        if dst is None:
            return False
        self.copies.append((last.idx, dst.idx))
        table[-1] = dst
        self.gpu.free(last)
        return True

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = [self.gpu.share(b) for b in self.tables[parent]]  # clean: owned by the child's table

    def expand_beams(self, parent: int, children: Sequence[int]) -> int:
        made = 0
        for child in children:
            shared = []
            for b in self.tables[parent]:
                shared.append(self.gpu.share(b))  # leak: shared is dropped when the table limit stops the loop
            if len(self.tables) >= self.max_seqs:
                log.warning("beam expansion of %d stopped after %d", parent, made)
                break
            self.tables[child] = shared
            made += 1
        return made

    def reserve_lookahead(self, seq_id: int, k: int) -> int:
        extra = []
        for _ in range(k):
            blk = self.gpu.allocate()  # leak: extra is dropped when the sequence is no longer in tables
            if blk is None:
                break
            extra.append(blk)
        table = self.tables.get(seq_id)
        if table is None:
            return 0
        table.extend(extra)
        return len(extra)

    def swap_out(self, seq_id: int) -> Dict[int, int]:
        mapping: Dict[int, int] = {}
        host: List[Block] = []
        for b in self.tables[seq_id]:
            dst = self.cpu.allocate()  # leak: host blocks taken so far are lost when OutOfBlocks is raised
            if dst is None:
                raise OutOfBlocks(f"no cpu blocks for seq {seq_id}")
            mapping[b.idx] = dst.idx
            host.append(dst)
        for b in self.tables.pop(seq_id):
            self.gpu.free(b)
        self.swapped[seq_id] = host
        return mapping

    def swap_in(self, seq_id: int) -> Optional[Dict[int, int]]:
        host = self.swapped[seq_id]
        dev: List[Block] = []
        for _ in host:
            blk = self.gpu.allocate()  # clean: freed on shortage, else owned by the table
            if blk is None:
                while dev:
                    self.gpu.free(dev.pop())
                return None
            dev.append(blk)
        mapping = {h.idx: d.idx for h, d in zip(host, dev)}
        self.tables[seq_id] = dev
        for h in self.swapped.pop(seq_id):
            self.cpu.free(h)
        return mapping

    def compact(self, seq_id: int, low_mark: int) -> int:
        table, moved = self.tables[seq_id], 0
        for i, b in enumerate(table):
            if b.ref > 1 or b.idx < low_mark:
                continue
            dst = self.gpu.allocate()  # clean: near miss, freed when not lower, else swapped into the table
            if dst is None:
                break
            if dst.idx >= b.idx:
                self.gpu.free(dst)
                continue
            self.copies.append((b.idx, dst.idx))
            table[i] = dst
            self.gpu.free(b)
            moved += 1
        return moved

    def export_seq(self, seq_id: int, send: Callable[[Block, Block], bool]) -> bool:
        staging = self.cpu.allocate()  # leak: not freed when send() says no
        if staging is None:
            return False
        for b in self.tables[seq_id]:
            if not send(staging, b):
                log.error("export of seq %d refused at block %d", seq_id, b.idx)
                return False
        self.cpu.free(staging)
        return True

    def free_seq(self, seq_id: int) -> None:
        for b in self.tables.pop(seq_id, ()):
            self.gpu.free(b)
        for b in self.swapped.pop(seq_id, ()):
            self.cpu.free(b)
