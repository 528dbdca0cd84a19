"""Draft slots for speculative decoding."""
from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch


class DraftSlots:
    """Rows of the draft logits tensor, given out through a stack with a cursor."""

    def __init__(self, rows: int, vocab: int):
        self.logits = torch.zeros(rows, vocab)
        self._stack: List[int] = list(reversed(range(rows)))
        self._top = rows

    def get(self) -> Optional[int]:
        if self._top == 0:
            return None
        self._top -= 1  # clean: the row above the cursor is returned
        return self._stack[self._top]

    def put(self, row: int) -> None:
        self._stack[self._top] = row
        self._top += 1

    def available(self) -> int:
        return self._top


class DraftRequest:
    def __init__(self, rid: str, greedy: bool):
        self.rid = rid
        self.greedy = greedy
        self.row: Optional[int] = None
        self.bonus: Optional[int] = None
        self.accepted: List[int] = []


class SpecDecoder:
    def __init__(self, slots: DraftSlots, use_bonus: bool):
        self.slots = slots
        self.use_bonus = use_bonus
        self.running: Dict[str, DraftRequest] = {}
        self._verify_row: Optional[int] = None
        self._trace_row: Optional[int] = None

    def add(self, req: DraftRequest) -> bool:
        if req.rid in self.running:
            return False
        req.row = self.slots.get()  # clean: near miss, the request is in running before the bonus is tried, and remove puts the row back
        if req.row is None:
            return False
        self.running[req.rid] = req
        if self.use_bonus:
            req.bonus = self.slots.get()  # clean: near miss, remove has no use_bonus test but puts back every bonus that is not None
        return True

    def remove(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            return
        if req.row is not None:
            self.slots.put(req.row)
            req.row = None
        if req.bonus is not None:
            self.slots.put(req.bonus)
            req.bonus = None

    def start_verify(self) -> None:
        if self.use_bonus and self._verify_row is None:
            self._verify_row = self.slots.get()  # clean: near miss, use_bonus never changes and stop_verify asks the same flag

    def stop_verify(self) -> None:
        if self.use_bonus and self._verify_row is not None:
            self.slots.put(self._verify_row)
            self._verify_row = None

    def start_trace(self, verbose: bool) -> None:
        if self._trace_row is None:
            self._trace_row = self.slots.get()  # leak: taken whatever verbose is, stop_trace without verbose only clears the field

    def stop_trace(self, verbose: bool) -> None:
        if verbose and self._trace_row is not None:
            self.slots.put(self._trace_row)
        self._trace_row = None

    def score(self, req: DraftRequest, draft: torch.Tensor) -> int:
        tmp = None
        if not req.greedy:
            tmp = self.slots.get()  # clean: near miss, the second test of greedy matches the first
            if tmp is None:
                return 0
            self.slots.logits[tmp, : draft.numel()].copy_(draft)
        best = int(draft.argmax())
        if not req.greedy:
            self.slots.put(tmp)
        return best

    def score_many(self, req: DraftRequest, drafts: Sequence[torch.Tensor]) -> int:
        best = 0
        if len(drafts) > 1:
            tmp = self.slots.get()  # leak: put needs more than two drafts, so with exactly two the row is lost
            if tmp is None:
                return best
            for d in drafts:
                self.slots.logits[tmp, : d.numel()].copy_(d)
                best = max(best, int(d.argmax()))
            if len(drafts) > 2:
                self.slots.put(tmp)
        return best

    def rescore(self, req: DraftRequest, draft: torch.Tensor, limit: int) -> bool:
        row = self.slots.get()  # leak: a hit returns from the loop before put
        if row is None:
            return False
        for i in range(limit):
            self.slots.logits[row, : draft.numel()].copy_(draft * (i + 1))
            if int(self.slots.logits[row].argmax()) in req.accepted:
                return True
        self.slots.put(row)
        return False

    def accept(self, req: DraftRequest, token: int) -> bool:
        row = self.slots.get()  # leak: a token already accepted returns True without put
        if row is None:
            return False
        if token in req.accepted:
            return True
        req.accepted.append(token)
        self.slots.logits[row].zero_()
        self.slots.put(row)
        return True

    def move_row(self, req: DraftRequest) -> bool:
        """Moves a request to another row (compaction)."""
        new = self.slots.get()  # clean: near miss, the old row goes back and the request takes the new one
        if new is None:
            return False
        old, req.row = req.row, new
        if old is not None:
            self.slots.logits[new].copy_(self.slots.logits[old])
            self.slots.put(old)
        return True

    def borrow_rows(self, n: int) -> List[int]:
        """n rows or none; end with return_rows."""
        rows: List[int] = []
        for _ in range(n):
            row = self.slots.get()  # clean: near miss, all rows collected go back before the empty list is returned
            if row is None:
                self.return_rows(rows)
                return []
            rows.append(row)
        return rows

    def return_rows(self, rows: List[int]) -> None:
        while rows:
            self.slots.put(rows.pop())

    def tree_verify(self, drafts: Sequence[torch.Tensor]) -> Optional[int]:
        rows = self.borrow_rows(len(drafts))  # clean: return_rows gives them all back
        if not rows:
            return None
        for row, d in zip(rows, drafts):
            self.slots.logits[row, : d.numel()].copy_(d)
        best = max(range(len(rows)), key=lambda i: float(self.slots.logits[rows[i]].max()))
        self.return_rows(rows)
        return best
