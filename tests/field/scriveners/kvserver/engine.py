"""The engine decides which sequences run and what happens to their blocks."""
from __future__ import annotations

import logging
from typing import Optional

from .blocks import BlockManager
from .sequences import Sequence, SequenceTable

log = logging.getLogger("kvserver.engine")


class Engine:
    def __init__(self, manager: BlockManager, host: BlockManager, table: SequenceTable, watermark: int) -> None:
        self.manager = manager
        self.host = host
        self.table = table
        self.watermark = watermark
        self.running: list[Sequence] = []
        self.swapped: dict[int, list[int]] = {}
        self.scratch: Optional[int] = None

    def add(self, tokens: list[int], keys: list[int]) -> Optional[int]:
        if self.manager.free_count() < self.watermark:
            return None
        sequence = self.table.admit(tokens, keys)  # clean: kept in running until retire()
        if sequence is None:
            return None
        self.running.append(sequence)
        return sequence.sid

    def retire(self) -> list[int]:
        finished = [s for s in self.running if s.done]
        self.running = [s for s in self.running if not s.done]
        for sequence in finished:
            self.table.drop(sequence.sid)
            self.host.release_all(self.swapped.pop(sequence.sid, []))
        return [s.sid for s in finished]

    def swap_out(self, sequence: Sequence) -> bool:
        target = self.host.allocate_run(len(sequence.blocks))  # clean: kept in swapped until swap_in(), retire() or close()
        if target is None:
            return False
        self.manager.release_all(sequence.blocks)
        sequence.blocks = []
        self.swapped[sequence.sid] = target
        return True

    def swap_in(self, sequence: Sequence) -> bool:
        source = self.swapped[sequence.sid]
        fresh = self.manager.allocate_run(len(source))  # clean: moved into the sequence
        if fresh is None:
            return False
        sequence.blocks = fresh
        self.host.release_all(self.swapped.pop(sequence.sid))
        return True

    def copy_on_write(self, sequence: Sequence, index: int) -> bool:
        fresh = self.manager.allocate()  # clean: near miss, it takes the place of the shared one, which is released
        if fresh is None:
            return False
        shared, sequence.blocks[index] = sequence.blocks[index], fresh
        self.manager.release(shared)
        return True

    def defragment(self, sequence: Sequence) -> bool:
        """Moves a sequence into a fresh run."""
        fresh = self.manager.allocate_even(len(sequence.blocks))  # leak: lost when the run is not contiguous
        if fresh is None:
            return False
        if fresh and fresh[-1] - fresh[0] != 2 * (len(fresh) - 1):
            log.debug("no contiguous run for %d", sequence.sid)
            return False
        old, sequence.blocks = sequence.blocks, fresh
        self.manager.release_all(old)
        return True

    def beam(self, sequence: Sequence, width: int) -> list[Sequence]:
        """Keeps the best of some continuations."""
        beams: list[Sequence] = []
        for _ in range(width):
            beams.append(self.table.fork(sequence.sid))  # clean: losers are dropped, winners go to the caller
        beams.sort(key=lambda s: sum(s.tokens), reverse=True)
        for loser in beams[width // 2 + 1:]:
            self.table.drop(loser.sid)
        return beams[:width // 2 + 1]

    def best_of(self, sequence: Sequence, width: int) -> int:
        beams = self.beam(sequence, width)  # leak: the beams behind the first are never dropped
        best = beams[0]
        total = sum(best.tokens)
        self.table.drop(best.sid)
        return total

    def renew_scratch(self) -> None:
        if self.scratch is not None:
            self.manager.release(self.scratch)
        self.scratch = self.manager.allocate()  # clean: near miss, the old one was released just before

    def close(self) -> None:
        if self.scratch is not None:
            self.manager.release(self.scratch)
            self.scratch = None
        for sequence in self.running:
            self.table.drop(sequence.sid)
        self.running.clear()
        while self.swapped:
            _, blocks = self.swapped.popitem()
            self.host.release_all(blocks)
