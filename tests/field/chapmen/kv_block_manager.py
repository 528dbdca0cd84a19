"""Paged KV cache: block pool, per-sequence block tables and swap space."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


@dataclass
class Block:
    index: int
    refs: int = 0
    filled: int = 0


class BlockPool:
    """Fixed set of physical blocks with reference counts."""

    def __init__(self, num_blocks: int, block_size: int, device: str) -> None:
        self.block_size = block_size
        self.device = device
        self.num_blocks = num_blocks
        self._free: Deque[Block] = deque(Block(i) for i in range(num_blocks))

    def available(self) -> int:
        return len(self._free)

    def usage(self) -> float:
        return 1.0 - len(self._free) / max(1, self.num_blocks)

    def take(self) -> Optional[Block]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.refs = 1
        block.filled = 0
        return block

    def share(self, block: Block) -> Block:
        block.refs += 1
        return block

    def give(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            self._free.append(block)

    def take_upto(self, n: int) -> Optional[List[Block]]:
        out: List[Block] = []
        for _ in range(n):
            block = self.take()  # leak: blocks already in out are dropped when the pool runs dry midway
            if block is None:
                logger.debug("%s pool dry after %d of %d", self.device, len(out), n)
                return None
            out.append(block)
        return out

    def take_exact(self, n: int) -> Optional[List[Block]]:
        out: List[Block] = []
        while len(out) < n:
            block = self.take()  # clean: collected and returned, or all given back on shortage
            if block is None:
                for got in out:
                    self.give(got)
                return None
            out.append(block)
        return out


@dataclass
class SequenceTable:
    seq_id: int
    blocks: List[Block]
    tokens: int = 0
    copies: List[Tuple[int, int]] = field(default_factory=list)


class BlockManager:
    def __init__(self, gpu: BlockPool, watermark: float = 0.01) -> None:
        self.gpu = gpu
        self.watermark = int(watermark * gpu.num_blocks)
        self.tables: Dict[int, SequenceTable] = {}

    def _blocks_for(self, tokens: int) -> int:
        return (tokens + self.gpu.block_size - 1) // self.gpu.block_size

    def admit(self, seq_id: int, prompt_len: int) -> bool:
        if seq_id in self.tables:
            return True
        need = self._blocks_for(prompt_len)
        if self.gpu.available() - need < self.watermark:
            return False
        blocks = self.gpu.take_exact(need)  # clean: moved into the sequence table, given by release()
        if blocks is None:
            return False
        self.tables[seq_id] = SequenceTable(seq_id, blocks, prompt_len)
        return True

    def append_token(self, seq_id: int) -> bool:
        table = self.tables[seq_id]
        last = table.blocks[-1]
        if last.filled == self.gpu.block_size:
            block = self.gpu.take()  # clean: near miss, None-checked and appended to the table
            if block is None:
                return False
            block.filled = 1
            table.blocks.append(block)
        elif last.refs > 1:
            fresh = self.gpu.take()  # clean: replaces the shared tail, which is given back
            if fresh is None:
                return False
            fresh.filled = last.filled + 1
            table.copies.append((last.index, fresh.index))
            table.blocks[-1] = fresh
            self.gpu.give(last)
        else:
            last.filled += 1
        table.tokens += 1
        return True

    def fork(self, parent_id: int, child_id: int) -> None:
        if child_id in self.tables:
            return
        parent = self.tables[parent_id]
        blocks = [self.gpu.share(b) for b in parent.blocks]  # clean: stored in the child's table
        self.tables[child_id] = SequenceTable(child_id, blocks, parent.tokens)

    def reserve_lookahead(self, seq_id: int, n: int) -> Optional[List[Block]]:
        """Hold the tail of a sequence plus n empty blocks for a draft run."""
        table = self.tables[seq_id]
        held = self.gpu.share(table.blocks[-1])  # leak: the share stays when the lookahead blocks run short
        extra: List[Block] = []
        for _ in range(n):
            block = self.gpu.take()  # clean: near miss, every one taken so far is given on shortage
            if block is None:
                for b in extra:
                    self.gpu.give(b)
                return None
            extra.append(block)
        return [held] + extra

    def draft_room(self, seq_id: int, n: int) -> int:
        """Number of draft tokens that fit after the tail of the sequence."""
        blocks = self.reserve_lookahead(seq_id, n)  # leak: the shared tail, blocks[0], is not given back
        if blocks is None:
            return 0
        room = sum(self.gpu.block_size - b.filled for b in blocks)
        for b in blocks[1:]:
            self.gpu.give(b)
        return room

    def rebuild(self, seq_id: int, tokens: int) -> bool:
        """Recompute path: the sequence starts over with new blocks."""
        table = self.tables[seq_id]
        blocks = self.gpu.take_upto(self._blocks_for(tokens))  # clean: replaces the given old blocks
        if blocks is None:
            return False
        for old in table.blocks:
            self.gpu.give(old)
        table.blocks = blocks
        table.tokens = tokens
        table.copies.clear()
        return True

    def probe_fragmentation(self, rounds: int) -> float:
        """Mean distance of consecutively handed out indices."""
        total, prev = 0, None
        for _ in range(rounds):
            block = self.gpu.take()  # leak: rebound each round through prev, only the final one is given
            if block is None:
                break
            if prev is not None:
                total += abs(block.index - prev.index)
            prev = block
        if prev is not None:
            self.gpu.give(prev)
        return total / max(1, rounds)

    def release(self, seq_id: int) -> None:
        table = self.tables.pop(seq_id, None)
        if table is None:
            return
        for block in reversed(table.blocks):
            self.gpu.give(block)


class SwapSpace:
    """Host blocks which stand in for preempted sequences."""

    def __init__(self, manager: BlockManager, cpu: BlockPool) -> None:
        self.manager = manager
        self.cpu = cpu
        self._swapped: Dict[int, List[Block]] = {}

    def swap_out(self, seq_id: int) -> Dict[int, int]:
        table = self.manager.tables[seq_id]
        host = self.cpu.take_exact(len(table.blocks))  # leak: abort() pops the host blocks and drops them
        if host is None:
            return {}
        mapping = {g.index: c.index for g, c in zip(table.blocks, host)}
        self._swapped[seq_id] = host
        self.manager.release(seq_id)
        return mapping

    def swap_in(self, seq_id: int, tokens: int) -> Dict[int, int]:
        if not self.manager.admit(seq_id, tokens):
            return {}
        host = self._swapped.pop(seq_id)
        table = self.manager.tables[seq_id]
        mapping = {c.index: g.index for c, g in zip(host, table.blocks)}
        for block in host:
            self.cpu.give(block)
        return mapping

    def abort(self, seq_id: int) -> None:
        if self._swapped.pop(seq_id, None) is not None:
            logger.info("aborted swapped sequence %d", seq_id)
        self.manager.release(seq_id)
