"""Paged KV block space: prompt admission, copy-on-write forks, swapping."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Optional


@dataclass
class PhysicalBlock:
    index: int
    sharers: int = 0
    filled: int = 0


class BlockStore:
    """Idle physical blocks of one device."""

    def __init__(self, num_blocks: int, block_size: int, watermark: int = 0) -> None:
        self.block_size = block_size
        self.watermark = watermark
        self._idle = deque(PhysicalBlock(i) for i in range(num_blocks))

    def idle_count(self) -> int:
        return len(self._idle)

    def draw(self) -> PhysicalBlock:
        if not self._idle:
            raise RuntimeError("no idle KV blocks")
        block = self._idle.popleft()
        block.sharers = 1
        block.filled = 0
        return block

    def draw_parity(self, parity: int) -> Optional[PhysicalBlock]:
        """Block on the even or odd memory channel, or None."""
        for _ in range(len(self._idle)):
            block = self._idle.popleft()  # clean: near miss, mismatching blocks rotate to the back
            if block.index % 2 == parity:
                block.sharers = 1
                return block
            self._idle.append(block)
        return None

    def draw_run(self, count: int) -> Optional[list[PhysicalBlock]]:
        """Physically consecutive blocks for the TMA prefill kernel."""
        run: list[PhysicalBlock] = []
        while self._idle:
            block = self._idle.popleft()  # leak: a broken run is dropped when restarting
            if run and block.index != run[-1].index + 1:
                run = []
            block.sharers = 1
            run.append(block)
            if len(run) == count:
                return run
        self._idle.extend(run)
        return None

    def share(self, block: PhysicalBlock) -> None:
        block.sharers += 1

    def retire(self, block: PhysicalBlock) -> None:
        block.sharers -= 1
        if block.sharers == 0:
            self._idle.append(block)


class BlockSpaceManager:
    def __init__(self, gpu: BlockStore, host: BlockStore) -> None:
        self.gpu = gpu
        self.host = host
        self.tables: dict[int, list[PhysicalBlock]] = {}
        self.swapped: dict[int, list[PhysicalBlock]] = {}
        self.pending_copies: list[tuple[int, int]] = []
        self.null_block = gpu.draw()  # clean: near miss, placeholder for life, close() retires it

    def admit(self, seq_id: int, prompt_len: int) -> bool:
        need = -(-prompt_len // self.gpu.block_size)
        if self.gpu.idle_count() - need < self.gpu.watermark:
            return False
        self.tables[seq_id] = [self.gpu.draw() for _ in range(need)]  # clean: in the table until evict()
        return True

    def admit_group(self, seq_ids: list[int], prompt_len: int) -> None:
        """Best-of-n candidates share one set of prompt blocks."""
        need = -(-prompt_len // self.gpu.block_size)
        prompt = [self.gpu.draw() for _ in range(need)]  # leak: the initial reference belongs to no sequence
        for seq_id in seq_ids:
            for block in prompt:
                self.gpu.share(block)  # clean: one reference per table, retired by evict()
            self.tables[seq_id] = list(prompt)

    def fork(self, parent_id: int, child_id: int) -> None:
        parent = self.tables[parent_id]
        for block in parent:
            self.gpu.share(block)  # clean: near miss, the child's table carries these references
        self.tables[child_id] = list(parent)

    def append_slot(self, seq_id: int) -> None:
        table = self.tables[seq_id]
        last = table[-1]
        if last.filled == self.gpu.block_size:
            last = self.gpu.draw()  # clean: appended to the table
            table.append(last)
        elif last.sharers > 1:
            fresh = self.gpu.draw()  # clean: near miss, replaces the shared tail, which is retired
            self.pending_copies.append((last.index, fresh.index))
            fresh.filled = last.filled
            table[-1] = fresh
            self.gpu.retire(last)
            last = fresh
        last.filled += 1

    def reserve_lookahead(self, seq_id: int, count: int) -> bool:
        extra = []
        for _ in range(count):
            block = self.gpu.draw_parity(seq_id % 2)  # leak: partial lookahead dropped when parity runs out
            if block is None:
                return False
            extra.append(block)
        self.tables[seq_id].extend(extra)
        return True

    def swap_out(self, seq_id: int) -> Optional[dict[int, int]]:
        moves: dict[int, int] = {}
        parked: list[PhysicalBlock] = []
        for block in self.tables[seq_id]:
            if not self.host.idle_count():
                for target in parked:
                    self.host.retire(target)
                return None
            target = self.host.draw()  # clean: near miss, rolled back on exhaustion, else in swapped
            parked.append(target)
            moves[block.index] = target.index
        for block in self.tables.pop(seq_id):
            self.gpu.retire(block)
        self.swapped[seq_id] = parked
        return moves

    def calibrate(self, copier) -> float:
        probe = self.gpu.draw()  # leak: disabled copier returns before retire
        if not copier.enabled:
            return 0.0
        cost = copier.time_copy(self.null_block.index, probe.index)
        self.gpu.retire(probe)
        return cost

    def evict(self, seq_id: int) -> None:
        for block in self.tables.pop(seq_id, ()):
            self.gpu.retire(block)
        for block in self.swapped.pop(seq_id, ()):
            self.host.retire(block)

    def close(self) -> None:
        for seq_id in [*self.tables, *self.swapped]:
            self.evict(seq_id)
        self.gpu.retire(self.null_block)
