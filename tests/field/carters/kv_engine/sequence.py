from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .block_manager import Block, BlockPool

_ids = itertools.count()


@dataclass
class Sequence:
    prompt: list[int]
    table: list[Block] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    score: float = 0.0
    seq_id: int = field(default_factory=lambda: next(_ids))

    def fork(self, pool: BlockPool) -> "Sequence":
        child = Sequence(list(self.prompt), output=list(self.output), score=self.score)
        for block in self.table:
            child.table.append(pool.fork(block))  # clean: held in the child's table
        return child

    def release(self, pool: BlockPool) -> None:
        pool.free_all(self.table)
        self.table.clear()


@dataclass
class SequenceGroup:
    request_id: str
    beam_width: int
    beams: list[Sequence] = field(default_factory=list)

    def expand(self, pool: BlockPool, candidates: list[tuple[int, int, float]]) -> None:
        """candidates: (beam index, token, log probability)."""
        children: list[Sequence] = []
        for index, token, logprob in candidates:
            child = self.beams[index].fork(pool)  # leak: children cut off by the sort are never released
            child.output.append(token)
            child.score += logprob
            children.append(child)
        children.sort(key=lambda s: s.score, reverse=True)
        for parent in self.beams:
            parent.release(pool)
        self.beams = children[: self.beam_width]

    def sample_n(self, pool: BlockPool, n: int) -> None:
        base = self.beams[0]
        while len(self.beams) < n:
            self.beams.append(base.fork(pool))  # clean: joins the group's beams, finish releases

    def finish(self, pool: BlockPool) -> list[list[int]]:
        outputs = []
        for beam in self.beams:
            outputs.append(beam.output)
            beam.release(pool)
        self.beams = []
        return outputs
