"""Speculative decoding engine: target and draft models share a table of sequence slots."""
from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple


class SlotTable:
    """Lowest free row first, so that the batch stays dense."""

    def __init__(self, rows: int) -> None:
        self._heap: List[int] = list(range(rows))

    def claim(self) -> Optional[int]:
        return heapq.heappop(self._heap) if self._heap else None

    def claim_below(self, limit: int) -> Optional[int]:
        if not self._heap:
            return None
        row = heapq.heappop(self._heap)  # leak: a row at or above the limit is popped and not pushed back
        return row if row < limit else None

    def claim_pair(self) -> Optional[Tuple[int, int]]:
        first = self.claim()  # clean: near miss, vacated when there is no second row
        if first is None:
            return None
        second = self.claim()  # clean: handed on to the caller in the pair
        if second is None:
            self.vacate(first)
            return None
        return first, second

    def claim_even(self) -> Optional[int]:
        skipped: List[int] = []
        found: Optional[int] = None
        while self._heap and found is None:
            row = heapq.heappop(self._heap)  # clean: near miss, skipped rows are pushed back before returning
            if row % 2 == 0:
                found = row
            else:
                skipped.append(row)
        for row in skipped:
            heapq.heappush(self._heap, row)
        return found

    def vacate(self, row: int) -> None:
        heapq.heappush(self._heap, row)

    def free_rows(self) -> int:
        return len(self._heap)


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    target_row: Optional[int] = None
    draft_row: Optional[int] = None
    tree_rows: List[int] = field(default_factory=list)
    accepted: int = 0
    use_draft: bool = True


class SpecEngine:
    def __init__(self, target: SlotTable, draft: SlotTable, k: int = 4, seed: int = 0) -> None:
        self.target = target
        self.draft = draft
        self.k = k
        self.rng = random.Random(seed)
        self.queue: Deque[Sequence] = deque()
        self.active: Dict[int, Sequence] = {}

    def submit(self, seq: Sequence) -> None:
        self.queue.append(seq)

    def schedule(self) -> int:
        started = 0
        while self.queue:
            row = self.target.claim()  # clean: near miss, vacated on the way on which the draft table is full
            if row is None:
                break
            seq = self.queue.popleft()
            if seq.use_draft:
                seq.draft_row = self.draft.claim()  # leak: disable_draft flips use_draft, and finish then skips the row
                if seq.draft_row is None:
                    self.target.vacate(row)
                    self.queue.appendleft(seq)
                    break
            seq.target_row = row
            self.active[seq.seq_id] = seq
            started += 1
        return started

    def disable_draft(self, seq_id: int) -> None:
        self.active[seq_id].use_draft = False

    def open_tree(self, seq: Sequence, width: int) -> int:
        for _ in range(width):
            row = self.draft.claim()  # clean: near miss, close_tree vacates every tree row and finish calls it
            if row is None:
                break
            seq.tree_rows.append(row)
        return len(seq.tree_rows)

    def close_tree(self, seq: Sequence) -> None:
        for row in seq.tree_rows:
            self.draft.vacate(row)
        seq.tree_rows.clear()

    def prune_tree(self, seq: Sequence, keep: int) -> None:
        for row in seq.tree_rows[keep:]:
            self.draft.vacate(row)
        del seq.tree_rows[keep:]

    def branch(self, seq: Sequence, new_id: int) -> Optional[Sequence]:
        rows = self.target.claim_pair()  # leak: only the first row of the pair goes into the branch
        if rows is None:
            return None
        child = Sequence(new_id, list(seq.tokens), target_row=rows[0], use_draft=False)
        self.active[new_id] = child
        return child

    def verify_isolated(self, seq: Sequence) -> bool:
        pair = self.draft.claim_pair()  # clean: near miss, both rows are vacated before the result is looked at
        if pair is None:
            return False
        ok = self._score(seq, pair[0]) <= self._score(seq, pair[1]) + self.k
        for row in pair:
            self.draft.vacate(row)
        return ok

    def _score(self, seq: Sequence, row: int) -> float:
        return self.rng.random() * (len(seq.tokens) + row)

    def compact(self, seq: Sequence) -> bool:
        if seq.target_row is None:
            return False
        row = self.target.claim_below(seq.target_row)  # clean: near miss, the row it replaces is vacated
        if row is None:
            return False
        self.target.vacate(seq.target_row)
        seq.target_row = row
        return True

    def align(self, seq: Sequence) -> bool:
        row = self.target.claim_even()  # leak: an even row already held returns False and drops the new one
        if row is None:
            return False
        if seq.target_row is not None and seq.target_row % 2 == 0:
            return False
        if seq.target_row is not None:
            self.target.vacate(seq.target_row)
        seq.target_row = row
        return True

    def step(self) -> List[int]:
        done: List[int] = []
        for seq in list(self.active.values()):
            if seq.use_draft:
                self.open_tree(seq, self.k)  # clean: near miss, rows stay in the tree until close_tree in this turn or in finish
            accepted = self.rng.randint(0, self.k) if seq.use_draft else 1
            seq.accepted += accepted
            seq.tokens.extend(self.rng.randrange(32000) for _ in range(accepted))
            if seq.accepted >= 64:
                self.finish(seq.seq_id)
                done.append(seq.seq_id)
                continue
            self.close_tree(seq)
        return done

    def finish(self, seq_id: int) -> None:
        seq = self.active.pop(seq_id)
        self.close_tree(seq)
        if seq.use_draft and seq.draft_row is not None:
            self.draft.vacate(seq.draft_row)
        if seq.target_row is not None:
            self.target.vacate(seq.target_row)
        seq.draft_row = seq.target_row = None

    def warmup(self) -> int:
        rows: List[int] = []
        while (row := self.target.claim()) is not None:  # clean: near miss, all claimed rows are vacated in the loop behind
            rows.append(row)
        for row in rows:
            self.target.vacate(row)
        return len(rows)
