"""Sequences, their block tables and their groups."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from .blocks import BlockManager


@dataclass
class Sequence:
    sid: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    draft_blocks: list[int] = field(default_factory=list)
    lookahead: Optional[int] = None
    done: bool = False

    def slots_left(self, block_size: int) -> int:
        return len(self.blocks) * block_size - len(self.tokens)


class SequenceTable:
    """All live sequences. drop() ends one."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self._live: dict[int, Sequence] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, sid: int) -> Sequence:
        return self._live[sid]

    def admit(self, tokens: list[int], keys: list[int]) -> Optional[Sequence]:
        shared = self.manager.match_prefix(keys)  # clean: released where the rest does not fit, else in the table
        missing = self.manager.blocks_for(len(tokens)) - len(shared)
        own = self.manager.allocate_run(max(0, missing))  # clean: kept in the table until drop()
        if own is None:
            self.manager.release_all(shared)
            return None
        sequence = Sequence(self._next, tokens, shared + own)
        self._next += 1
        self._live[sequence.sid] = sequence
        return sequence

    def prefix_hit_length(self, keys: list[int]) -> int:
        """How many tokens of a prompt would be found."""
        return len(self.manager.match_prefix(keys)) * self.manager.block_size  # leak: counted, not released

    def can_admit(self, tokens: list[int], keys: list[int]) -> bool:
        shared = self.manager.match_prefix(keys)  # clean: near miss, only counted, then released
        missing = self.manager.blocks_for(len(tokens)) - len(shared)
        self.manager.release_all(shared)
        return missing <= self.manager.free_count()

    def append(self, sid: int, token: int) -> bool:
        sequence = self._live[sid]
        if sequence.slots_left(self.manager.block_size) == 0:
            block = self.manager.allocate()  # clean: appended to the block table
            if block is None:
                return False
            sequence.blocks.append(block)
        sequence.tokens.append(token)
        return True

    def fork(self, sid: int) -> Sequence:
        parent = self._live[sid]
        blocks = [self.manager.share(block) for block in parent.blocks]  # clean: near miss, held by the child
        child = Sequence(self._next, list(parent.tokens), blocks)
        self._next += 1
        self._live[child.sid] = child
        return child

    def set_lookahead(self, sid: int) -> bool:
        """Reserves one block ahead; decoding moves it into the table."""
        sequence = self._live[sid]
        if sequence.lookahead is not None:
            return True
        sequence.lookahead = self.manager.allocate()  # clean: near miss, used by take_lookahead or dropped
        return sequence.lookahead is not None

    def take_lookahead(self, sid: int) -> bool:
        sequence = self._live[sid]
        if sequence.lookahead is None:
            return False
        sequence.blocks.append(sequence.lookahead)
        sequence.lookahead = None
        return True

    def place_draft(self, sid: int, count: int) -> int:
        """Blocks for speculative tokens."""
        sequence = self._live[sid]
        run = self.manager.allocate_up_to(count)  # leak: drop() releases the draft blocks of no sequence
        sequence.draft_blocks.extend(run)
        return len(run)

    def drop(self, sid: int) -> None:
        sequence = self._live.pop(sid)
        sequence.done = True
        self.manager.release_all(sequence.blocks)
        sequence.blocks = []
        if sequence.lookahead is not None:
            self.manager.release(sequence.lookahead)
            sequence.lookahead = None
