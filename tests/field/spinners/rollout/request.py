from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from .blocks import Block, BlockManager

BLOCK = 4


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    table: List[Block] = field(default_factory=list)
    finished: bool = False
    score: float = 0.0

    def blocks_needed(self) -> int:
        return -(-len(self.tokens) // BLOCK) - len(self.table)


@dataclass
class RolloutRequest:
    prompt: List[int]
    n: int
    sequences: List[Sequence] = field(default_factory=list)
    drafts: List[Sequence] = field(default_factory=list)
    shared: Optional[Block] = None
    state: str = "waiting"

    def fork_draft(self, parent: Sequence, seq_id: int, manager: BlockManager) -> Sequence:
        draft = Sequence(seq_id, list(parent.tokens), [manager.incref(b) for b in parent.table])  # clean: in the table of the draft
        self.drafts.append(draft)
        return draft

    def drop_unfinished(self) -> int:
        before = len(self.drafts)
        self.drafts = [d for d in self.drafts if d.finished]
        return before - len(self.drafts)


def free_sequence(seq: Sequence, manager: BlockManager) -> None:
    for block in seq.table:
        manager.decref(block)
    seq.table.clear()
