from __future__ import annotations

import logging
from typing import Callable

from .blocks import BlockPool, TieredHostPool
from .copies import CopyEngine
from .seqs import Sequence, State

log = logging.getLogger(__name__)


class SwapScheduler:
    def __init__(self, gpu: BlockPool, host: TieredHostPool, copies: CopyEngine, block: int = 16, max_blocks: int = 512) -> None:
        self.gpu = gpu
        self.host = host
        self.copies = copies
        self.block = block
        self.max_blocks = max_blocks
        self.seqs: dict[str, Sequence] = {}

    def prefill(self, seq: Sequence) -> bool:
        if seq.sid in self.seqs:
            return False
        blocks = self.gpu.alloc(-(-seq.length // self.block))  # clean: belongs to the sequence, whose release() frees it
        if blocks is None:
            return False
        seq.gpu = blocks
        seq.state = State.RUNNING
        self.seqs[seq.sid] = seq
        return True

    def grow(self, seq: Sequence) -> bool:
        if seq.length % self.block:
            seq.length += 1
            return True
        extra = self.gpu.alloc(1)  # leak: a sequence at its maximum ends here with the new block in no list
        if extra is None:
            return False
        if len(seq.gpu) >= self.max_blocks:
            seq.reason = "length"
            return False
        seq.gpu += extra
        seq.length += 1
        return True

    def look_ahead(self, seq: Sequence, tokens: int) -> bool:
        if seq.lookahead:
            return True
        blocks = self.gpu.alloc(-(-tokens // self.block))  # leak: a sequence that ends before promote() is released without its look-ahead blocks
        if blocks is None:
            return False
        seq.lookahead = blocks
        return True

    def fork(self, seq: Sequence, sid: str) -> Sequence | None:
        if sid in self.seqs:
            return None
        blocks = self.gpu.alloc(len(seq.gpu))  # clean: near miss, belongs to the child; a copy that fails or is refused releases the child
        if blocks is None:
            return None
        child = Sequence(sid, seq.length, State.MOVING, gpu=blocks)

        def done(ok: bool) -> None:
            if not ok or child.aborted:
                self.seqs.pop(sid, None)
                child.release(self.gpu, self.host)
            else:
                child.state = State.RUNNING

        self.seqs[sid] = child
        if not self.copies.start(list(zip(seq.gpu, blocks)), done):
            done(False)
            return None
        return child

    def swap_out(self, seq: Sequence) -> bool:
        if seq.state is not State.RUNNING:
            return False
        cpu = self.host.alloc(len(seq.gpu))  # clean: near miss, freed when the copy is refused or fails, else the sequence's
        if cpu is None:
            return False

        def done(ok: bool) -> None:
            if ok:
                self.gpu.free(seq.gpu)
                seq.gpu, seq.cpu = [], cpu
                seq.state = State.SWAPPED
            else:
                self.host.free(cpu)
                seq.state = State.RUNNING
            self._after_move(seq)

        return self._move(seq, list(zip(seq.gpu, cpu)), done, lambda: self.host.free(cpu))

    def swap_in(self, seq: Sequence) -> bool:
        if seq.state is not State.SWAPPED:
            return False
        gpu = self.gpu.alloc(len(seq.cpu))  # leak: done(False) keeps the host copy and forgets these blocks
        if gpu is None:
            return False

        def done(ok: bool) -> None:
            if ok:
                self.host.free(seq.cpu)
                seq.cpu, seq.gpu = [], gpu
            seq.state = State.RUNNING if ok else State.SWAPPED
            self._after_move(seq)

        return self._move(seq, list(zip(seq.cpu, gpu)), done, lambda: self.gpu.free(gpu))

    def _move(self, seq: Sequence, pairs: list, done: Callable[[bool], None], undo: Callable[[], None]) -> bool:
        if not self.copies.start(pairs, done):
            log.info("%s cannot move now", seq.sid)
            undo()
            return False
        seq.state = State.MOVING
        return True

    def _after_move(self, seq: Sequence) -> None:
        if seq.aborted:
            self.end(seq, "aborted")

    def end(self, seq: Sequence, reason: str) -> None:
        seq.reason = seq.reason or reason
        if self.seqs.pop(seq.sid, None) is not None:
            seq.release(self.gpu, self.host)

    def abort(self, sid: str) -> None:
        seq = self.seqs.get(sid)
        if seq is None:
            return
        seq.aborted = True
        if seq.state is not State.MOVING:
            self.end(seq, "aborted")

    def checksum(self, seq: Sequence, reduce: Callable[[list], int]) -> int:
        with self.host.scratch(len(seq.gpu)) as blocks:  # clean: the context manager frees
            return reduce(list(zip(seq.gpu, blocks)))

    def compact(self, seq: Sequence, copy: Callable[[int, int], None]) -> int:
        """Moves blocks of a sequence to lower places, one at a time."""
        moved = 0
        for i, old in enumerate(seq.gpu):
            spare = self.gpu.alloc(1)  # leak: a spare block that is not lower ends the loop without being freed
            if spare is None:
                break
            if spare[0] >= old:
                break
            copy(old, spare[0])
            seq.gpu[i] = spare[0]
            self.gpu.free([old])
            moved += 1
        return moved

    def step(self) -> None:
        self.copies.poll()
        for seq in [s for s in self.seqs.values() if s.state is State.RUNNING]:
            if not self.grow(seq):
                if seq.reason:
                    self.end(seq, seq.reason)
                else:
                    self.swap_out(seq)
        for seq in [s for s in self.seqs.values() if s.state is State.SWAPPED]:
            if not self.swap_in(seq):
                break

    def shutdown(self) -> None:
        self.copies.drain()
        for seq in list(self.seqs.values()):
            self.end(seq, "shutdown")
