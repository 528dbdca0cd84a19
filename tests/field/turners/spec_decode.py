"""Speculative decoding worker: draft and target KV rows, proposal buffers, verification."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)
NO_ROW = -1


class RowPool:
    def __init__(self, name: str, rows: int) -> None:
        self.name = name
        self._vacant = list(range(rows))

    def occupy(self) -> int:
        return self._vacant.pop() if self._vacant else NO_ROW

    def vacate(self, row: int) -> None:
        self._vacant.append(row)

    def occupy_many(self, n: int) -> List[int]:
        """All or nothing; an empty list when there are not enough."""
        if n > len(self._vacant):
            return []
        taken = self._vacant[-n:]
        del self._vacant[-n:]
        return taken

    def vacate_many(self, rows: Iterable[int]) -> None:
        self._vacant.extend(rows)

    def __len__(self) -> int:
        return len(self._vacant)


@dataclass
class SpecRequest:
    rid: str
    tokens: List[int]
    draft_row: int = NO_ROW
    target_row: int = NO_ROW
    shadow_row: int = NO_ROW
    tree_rows: List[int] = field(default_factory=list)


class SpecWorker:
    def __init__(self, draft: RowPool, target: RowPool, num_steps: int = 4) -> None:
        self.draft = draft
        self.target = target
        self.num_steps = num_steps
        self.requests: Dict[str, SpecRequest] = {}
        self.stash: Dict[str, List[int]] = {}

    def register(self, req: SpecRequest) -> bool:
        draft_row = self.draft.occupy()  # leak: no target row means False without vacating the draft row
        if draft_row == NO_ROW:
            return False
        target_row = self.target.occupy()  # clean: stored in the request
        if target_row == NO_ROW:
            return False
        self.unregister(req.rid)
        req.draft_row, req.target_row = draft_row, target_row
        self.requests[req.rid] = req
        return True

    def register_all(self, reqs: Sequence[SpecRequest]) -> List[SpecRequest]:
        refused = []
        for req in reqs:
            if req.rid in self.requests:
                continue
            draft_row = self.draft.occupy()  # clean: near miss, vacated on the refused branch unless it was none
            target_row = self.target.occupy()  # clean: near miss, vacated on the refused branch unless it was none
            if NO_ROW in (draft_row, target_row):
                if draft_row != NO_ROW:
                    self.draft.vacate(draft_row)
                if target_row != NO_ROW:
                    self.target.vacate(target_row)
                refused.append(req)
                continue
            req.draft_row, req.target_row = draft_row, target_row
            self.requests[req.rid] = req
        return refused

    def unregister(self, rid: str) -> None:
        req = self.requests.pop(rid, None)
        if req is None:
            return
        self.draft.vacate(req.draft_row)
        self.target.vacate(req.target_row)
        self.target.vacate_many(req.tree_rows)
        if req.shadow_row != NO_ROW:
            self.target.vacate(req.shadow_row)
        req.draft_row = req.target_row = req.shadow_row = NO_ROW
        req.tree_rows = []

    def move_draft(self, req: SpecRequest) -> bool:
        """Re-home the draft state, e.g. after compaction."""
        row = self.draft.occupy()  # clean: near miss, the older row is vacated before the field is overwritten
        if row == NO_ROW:
            return False
        if req.draft_row != NO_ROW:
            self.draft.vacate(req.draft_row)
        req.draft_row = row
        return True

    def shadow_target(self, req: SpecRequest) -> bool:
        """A second target row for re-scoring."""
        row = self.target.occupy()  # leak: shadowing a request again overwrites the row of the first time
        if row == NO_ROW:
            return False
        req.shadow_row = row
        return True

    def propose(self, req: SpecRequest) -> List[int]:
        rows = self.draft.occupy_many(self.num_steps)  # clean: near miss, an empty list needs no vacate
        if not rows:
            return []
        proposal = [(req.tokens[-1] + i) % 997 for i, _ in enumerate(rows)]
        self.draft.vacate_many(rows)
        return proposal

    def propose_tree(self, req: SpecRequest, width: int) -> int:
        rows = self.target.occupy_many(width)  # clean: added to the request's tree rows, accept or unregister vacates
        req.tree_rows.extend(rows)
        return len(rows)

    def accept(self, req: SpecRequest, accepted: int) -> None:
        keep, drop = req.tree_rows[:accepted], req.tree_rows[accepted:]
        self.target.vacate_many(drop)
        req.tree_rows = keep

    def propose_ahead(self, req: SpecRequest, width: int) -> None:
        rows = self.draft.occupy_many(width)  # leak: collect pops the stash and drops the rows when nothing was accepted
        if rows:
            self.discard(req.rid)
            self.stash[req.rid] = rows

    def collect(self, rid: str, accepted: int) -> int:
        rows = self.stash.pop(rid, [])
        if accepted == 0:
            return 0
        self.draft.vacate_many(rows)
        return min(accepted, len(rows))

    def discard(self, rid: str) -> None:
        self.draft.vacate_many(self.stash.pop(rid, []))

    def verify(self, req: SpecRequest, proposal: Sequence[int]) -> List[int]:
        rows = self.target.occupy_many(len(proposal))  # leak: the first mismatch returns before vacate_many
        accepted: List[int] = []
        for row, token in zip(rows, proposal):
            if (row + token) % 13 == 0:
                return accepted
            accepted.append(token)
        self.target.vacate_many(rows)
        return accepted

    def verify_greedy(self, req: SpecRequest, proposal: Sequence[int]) -> List[int]:
        rows = self.target.occupy_many(len(proposal))  # clean: near miss, break stays in front of vacate_many
        accepted: List[int] = []
        for row, token in zip(rows, proposal):
            if (row + token) % 13 == 0:
                break
            accepted.append(token)
        self.target.vacate_many(rows)
        return accepted

    def verify_partial(self, req: SpecRequest, proposal: Sequence[int]) -> int:
        rows = self.target.occupy_many(len(proposal))  # leak: of the rows only the accepted ones are given back
        accepted = 0
        while accepted < len(rows) and (rows[accepted] + proposal[accepted]) % 13:
            accepted += 1
        self.target.vacate_many(rows[:accepted])
        return accepted

    def verify_split(self, req: SpecRequest, proposal: Sequence[int]) -> int:
        rows = self.target.occupy_many(len(proposal))  # clean: near miss, rejected ones vacated and accepted ones kept in the request
        accepted = 0
        while accepted < len(rows) and (rows[accepted] + proposal[accepted]) % 13:
            accepted += 1
        self.target.vacate_many(rows[accepted:])
        req.tree_rows.extend(rows[:accepted])
        return accepted


def _reserve_pair(worker: SpecWorker) -> Optional[Tuple[int, int]]:
    d = worker.draft.occupy()  # clean: near miss, vacated when the target is full, else returned
    if d == NO_ROW:
        return None
    t = worker.target.occupy()  # clean: returned in the pair
    if t == NO_ROW:
        worker.draft.vacate(d)
        return None
    return d, t


def bench_pair(worker: SpecWorker, rounds: int) -> int:
    pair = _reserve_pair(worker)  # leak: only the draft row is given back
    if pair is None:
        return 0
    d, _ = pair
    total = sum((d + i) % 7 for i in range(rounds))
    worker.draft.vacate(d)
    return total


def swap_pairs(worker: SpecWorker, reqs: Sequence[SpecRequest]) -> int:
    moved = 0
    for req in reqs:
        pair = _reserve_pair(worker)  # clean: near miss, trades places with the request's rows, which are vacated
        if pair is None:
            break
        (req.draft_row, req.target_row), (old_d, old_t) = pair, (req.draft_row, req.target_row)
        worker.draft.vacate(old_d)
        worker.target.vacate(old_t)
        moved += 1
    return moved


def calibrate(worker: SpecWorker, budgets: Sequence[int]) -> Dict[int, int]:
    result: Dict[int, int] = {}
    row = NO_ROW
    for budget in budgets:
        if row == NO_ROW:
            row = worker.draft.occupy()  # clean: near miss, taken once and vacated behind the loop
        if budget <= 0:
            continue
        result[budget] = row * budget
    if row != NO_ROW:
        worker.draft.vacate(row)
    return result


if __name__ == "__main__":
    w = SpecWorker(RowPool("draft", 8), RowPool("target", 8))
    reqs = [SpecRequest("a", [1]), SpecRequest("b", [2])]
    assert w.register_all(reqs) == []
    w.move_draft(reqs[0])
    assert len(w.propose(reqs[0])) == 4
    w.propose_tree(reqs[1], 3)
    w.accept(reqs[1], 1)
    w.verify_greedy(reqs[0], [1, 2])
    w.verify_split(reqs[0], [1, 2])
    assert swap_pairs(w, reqs) == 2
    calibrate(w, [0, 1])
    w.unregister("a"), w.unregister("b")
    assert len(w.draft) == 8 and len(w.target) == 8
