"""Paged KV block manager: device blocks, host swap blocks, copy-on-write forks."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


class Block:
    __slots__ = ("bid", "refs", "filled")

    def __init__(self, bid: int) -> None:
        self.bid = bid
        self.refs = 0
        self.filled = 0


class BlockPool:
    """Free list of fixed-size blocks living on one device."""

    def __init__(self, num_blocks: int, device: str) -> None:
        self.device = device
        self._free: Deque[Block] = deque(Block(i) for i in range(num_blocks))

    def available(self) -> int:
        return len(self._free)

    def grab(self) -> Block:
        if not self._free:
            raise OutOfBlocks(f"no free block on {self.device}")
        blk = self._free.popleft()  # clean: returned to the caller
        blk.refs = 1
        blk.filled = 0
        return blk

    def try_grab(self) -> Optional[Block]:
        if not self._free:
            return None
        return self.grab()  # clean: returned to the caller

    def retain(self, blk: Block) -> None:
        blk.refs += 1

    def drop(self, blk: Block) -> None:
        blk.refs -= 1
        if blk.refs == 0:
            self._free.append(blk)

    def grab_many(self, n: int) -> Optional[List[Block]]:
        out: List[Block] = []
        for _ in range(n):
            blk = self.try_grab()  # leak: the blocks gathered so far are dropped when the list runs dry
            if blk is None:
                return None
            out.append(blk)
        return out


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    parent: Optional[int] = None
    swapped: bool = False
    table: List[Block] = field(default_factory=list)


class KVBlockManager:
    def __init__(self, gpu_blocks: int, cpu_blocks: int, block_size: int, watermark: int = 2) -> None:
        self.gpu = BlockPool(gpu_blocks, "cuda")
        self.cpu = BlockPool(cpu_blocks, "cpu")
        self.block_size = block_size
        self.watermark = watermark
        self.seqs: Dict[int, Sequence] = {}

    def _need(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self.block_size)

    def can_admit(self, seq: Sequence) -> bool:
        return self.gpu.available() - self._need(seq) >= self.watermark

    def admit(self, seq: Sequence) -> bool:
        if seq.seq_id in self.seqs or not self.can_admit(seq):
            return False
        for _ in range(self._need(seq)):
            blk = self.gpu.grab()  # clean: lands in seq.table, which release() empties
            seq.table.append(blk)
        self.seqs[seq.seq_id] = seq
        return True

    def append_token(self, seq: Sequence, token: int) -> Optional[tuple]:
        """Returns a (src, dst) copy when the last block was shared."""
        seq.tokens.append(token)
        last = seq.table[-1]
        if last.filled == self.block_size:
            seq.table.append(self.gpu.grab())  # clean: lands in the sequence's table
            return None
        if last.refs > 1:
            fresh = self.gpu.grab()  # clean: near miss, replaces the shared block in the table
            fresh.filled = last.filled
            seq.table[-1] = fresh
            self.gpu.drop(last)
            return last.bid, fresh.bid
        last.filled += 1
        return None

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        if child.seq_id in self.seqs or parent.swapped:
            return False
        for blk in parent.table:
            self.gpu.retain(blk)  # clean: the child's table holds the count until release()
            child.table.append(blk)
        self.seqs[child.seq_id] = child
        return True

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        extra = self.gpu.grab_many(k)  # leak: a sequence that was preempted returns before the blocks are placed
        if extra is None:
            return False
        if seq.swapped:
            logger.debug("seq %d is swapped, lookahead skipped", seq.seq_id)
            return False
        seq.table.extend(extra)
        return True

    def swap_out(self, seq: Sequence, copier) -> bool:
        host = self.cpu.grab_many(len(seq.table))  # leak: the copier's refusal returns without giving the host blocks back
        if host is None:
            return False
        ok = copier.copy(seq.table, host)
        if not ok:
            logger.warning("swap-out of %d refused", seq.seq_id)
            return False
        for blk in seq.table:
            self.gpu.drop(blk)
        seq.table = host
        seq.swapped = True
        return True

    def swap_in(self, seq: Sequence, copier) -> bool:
        if self.gpu.available() < len(seq.table):
            return False
        dev = [self.gpu.grab() for _ in seq.table]  # clean: given back on a failed copy, else becomes the table
        if not copier.copy(seq.table, dev):
            for blk in dev:
                self.gpu.drop(blk)
            return False
        for blk in seq.table:
            self.cpu.drop(blk)
        seq.table = dev
        seq.swapped = False
        return True

    def defragment(self, limit: int) -> List[tuple]:
        moves = []
        for seq in self.seqs.values():
            if seq.swapped:
                continue
            for i, blk in enumerate(seq.table):
                if blk.bid < limit or blk.refs > 1:
                    continue
                target = self.gpu.try_grab()  # leak: a target above the limit is skipped and never dropped
                if target is None:
                    return moves
                if target.bid >= limit:
                    continue
                target.filled = blk.filled
                seq.table[i] = target
                moves.append((blk.bid, target.bid))
                self.gpu.drop(blk)
        return moves

    def release(self, seq: Sequence) -> None:
        pool = self.cpu if seq.swapped else self.gpu
        for blk in seq.table:
            pool.drop(blk)
        seq.table.clear()
        self.seqs.pop(seq.seq_id, None)

    def shutdown(self) -> None:
        for seq in list(self.seqs.values()):
            self.release(seq)
