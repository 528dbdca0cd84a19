"""Speculative decoding: draft rows come out of a slab of ids, verified rows move to the sequence."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional


class RowSlab:
    """A set of free ids plus a generation per id, so a stale id is told from a live one."""

    def __init__(self, rows: int) -> None:
        self._unused: set[int] = set(range(rows))
        self._gen = [0] * rows

    def take(self) -> Optional[int]:
        return self._unused.pop() if self._unused else None

    def put_back(self, row: int) -> None:
        self._gen[row] += 1
        self._unused.add(row)

    def put_back_all(self, rows: list[int]) -> None:
        for row in rows:
            self.put_back(row)


@dataclass
class SpecSeq:
    seq_id: int
    rows: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    done: bool = False


class DraftManager:
    def __init__(self, slab: RowSlab) -> None:
        self.slab = slab

    def _take_one(self) -> Optional[int]:
        return self.slab.take()  # clean: handed to the caller

    def draft_rows(self, k: int) -> list[int]:
        """As many as there are, up to k."""
        rows: list[int] = []
        while len(rows) < k:
            row = self._take_one()  # clean: near miss, a short list is returned and not dropped
            if row is None:
                break
            rows.append(row)
        return rows

    def settle(self, seq: SpecSeq, accepted: int) -> None:
        seq.rows.extend(seq.draft[:accepted])
        self.slab.put_back_all(seq.draft[accepted:])
        seq.draft = []

    def release(self, seq: SpecSeq) -> None:
        self.slab.put_back_all(seq.rows)
        self.slab.put_back_all(seq.draft)
        seq.rows, seq.draft = [], []


Verify = Callable[[SpecSeq, list[int]], int]


class SpecWorker:
    def __init__(self, drafts: DraftManager, k: int, adaptive: bool = False) -> None:
        self.drafts = drafts
        self.k = k
        self.adaptive = adaptive

    def propose(self, seq: SpecSeq, verify: Verify) -> int:
        seq.draft = self.drafts.draft_rows(self.k)  # clean: settled in the same step
        accepted = verify(seq, seq.draft)
        self.drafts.settle(seq, accepted)
        return accepted

    def propose_tree(self, seq: SpecSeq, verify: Verify, width: int) -> int:
        best: list[int] = []
        best_n = -1
        for _ in range(width):
            rows = self.drafts.draft_rows(self.k)  # leak: a better branch rebinds best and the older rows are lost
            n = verify(seq, rows)
            if n > best_n:
                best, best_n = rows, n
            else:
                self.drafts.slab.put_back_all(rows)
        seq.draft = best
        self.drafts.settle(seq, max(best_n, 0))
        return best_n

    def propose_two(self, seq: SpecSeq, verify: Verify) -> int:
        left = self.drafts.draft_rows(self.k)  # clean: the winner is settled, the loser goes back
        right = self.drafts.draft_rows(self.k)  # clean: near miss, either way one is settled and one goes back
        n_left, n_right = verify(seq, left), verify(seq, right)
        if n_left >= n_right:
            seq.draft, other, n = left, right, n_left
        else:
            seq.draft, other, n = right, left, n_right
        self.drafts.slab.put_back_all(other)
        self.drafts.settle(seq, n)
        return n

    def bonus(self, seq: SpecSeq) -> bool:
        row = self.drafts.slab.take()  # leak: a finished sequence returns with the row
        if row is None:
            return False
        if seq.done:
            return False
        seq.rows.append(row)
        return True

    def truncate(self, seq: SpecSeq, keep: int) -> None:
        tail = seq.rows[keep:]
        del seq.rows[keep:]
        self.drafts.slab.put_back_all(tail)

    def probe(self, seq: SpecSeq, verify: Verify) -> int:
        rows: Optional[list[int]] = None
        if self.adaptive:
            rows = self.drafts.draft_rows(1)  # clean: near miss, the second test reads the same flag
        n = verify(seq, rows or [])
        if self.adaptive and rows is not None:
            self.drafts.slab.put_back_all(rows)
        return n

    def calibrate(self, seqs: list[SpecSeq], verify: Verify) -> list[int]:
        hits: list[int] = []
        for seq in seqs:
            rows = self.drafts.draft_rows(self.k)  # leak: rows beyond the accepted ones are not put back
            n = verify(seq, rows)
            self.drafts.slab.put_back_all(rows[:n])
            hits.append(n)
        return hits
