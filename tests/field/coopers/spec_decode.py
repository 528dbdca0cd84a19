"""Speculative worker. Draft rows, tree-mask scratch, verification."""
from dataclasses import dataclass
from typing import Iterator, Optional

import numpy as np


class DraftRows:
    """Rows of the draft model's KV table."""

    def __init__(self, capacity: int) -> None:
        self._avail = list(range(capacity - 1, -1, -1))
        self.lengths = np.zeros(capacity, dtype=np.int32)

    def lease(self) -> int:
        if not self._avail:
            return -1
        row = self._avail.pop()
        self.lengths[row] = 0
        return row

    def drop(self, row: int) -> None:
        self._avail.append(row)


class MaskScratch:
    def __init__(self, n: int, width: int) -> None:
        self._stack = [np.zeros((width, width), dtype=bool) for _ in range(n)]
        self.outstanding = 0

    def grab(self) -> Optional[np.ndarray]:
        if not self._stack:
            return None
        self.outstanding += 1
        return self._stack.pop()

    def stow(self, mask: np.ndarray) -> None:
        mask.fill(False)
        self.outstanding -= 1
        self._stack.append(mask)


@dataclass
class Draft:
    req_id: int
    row: int
    tokens: list[int]
    mask: Optional[np.ndarray] = None


class SpecWorker:
    def __init__(self, rows: DraftRows, scratch: MaskScratch, draft_model, target_model, k: int = 4) -> None:
        self.rows = rows
        self.scratch = scratch
        self.draft_model = draft_model
        self.target_model = target_model
        self.k = k
        self.row_of: dict[int, int] = {}
        self.parked: dict[int, int] = {}

    def attach(self, req_id: int) -> bool:
        if req_id in self.row_of:
            return True
        row = self.rows.lease()  # clean: in row_of until detach
        if row < 0:
            return False
        self.row_of[req_id] = row
        return True

    def reattach(self, req_id: int, prompt: list[int]) -> bool:
        self.row_of[req_id] = self.rows.lease()  # leak: a request that still has a row gets it overwritten
        if self.row_of[req_id] < 0:
            del self.row_of[req_id]
            return False
        self.draft_model.prefill(self.row_of[req_id], prompt)
        return True

    def detach(self, req_id: int) -> None:
        for table in (self.row_of, self.parked):
            row = table.pop(req_id, -1)
            if row >= 0:
                self.rows.drop(row)

    def propose(self, req_id: int, last: int) -> Optional[Draft]:
        row = self.row_of.get(req_id, -1)
        if row < 0:
            return None
        mask = self.scratch.grab()  # leak: a draft without tokens gives None and the mask is gone
        if mask is None:
            return None
        toks = self.draft_model.extend(row, last, self.k)
        if not toks:
            return None
        n = len(toks)
        mask[:n, :n] = np.tri(n, dtype=bool)
        return Draft(req_id, row, toks, mask)

    def step(self, last_tokens: dict[int, int]) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        for req_id, last in last_tokens.items():
            draft = self.propose(req_id, last)  # leak: a wholly rejected draft goes on to the next request without stowing its mask
            if draft is None:
                out[req_id] = [self.target_model.sample_one(req_id, last)]
                continue
            accepted = self.target_model.verify(req_id, draft.tokens, draft.mask)
            if not accepted:
                out[req_id] = [self.target_model.bonus(req_id)]
                continue
            out[req_id] = accepted
            self.scratch.stow(draft.mask)
            draft.mask = None
        return out

    def step_batched(self, last_tokens: dict[int, int]) -> dict[int, list[int]]:
        drafts: list[Draft] = []
        for req_id, last in last_tokens.items():
            d = self.propose(req_id, last)  # clean: near miss, every collected draft is stowed after the batch
            if d is not None:
                drafts.append(d)
        if not drafts:
            return {}
        accepted = self.target_model.verify_many(drafts)
        out = {}
        for d, toks in zip(drafts, accepted, strict=True):
            self.scratch.stow(d.mask)
            d.mask = None
            if not toks:
                continue
            out[d.req_id] = toks
        return out

    def tree_positions(self, tree: list[int]) -> np.ndarray:
        mask = self.scratch.grab()  # leak: a copy is returned and the mask itself stays out
        if mask is None:
            return np.zeros(len(tree), dtype=np.int64)
        for child, parent in enumerate(tree):
            if parent >= 0:
                mask[child] |= mask[parent]
            mask[child, child] = True
        return mask[: len(tree)].sum(axis=1).copy()

    def tree_depth(self, tree: list[int]) -> int:
        mask = self.scratch.grab()  # clean: near miss, the depth is computed before the mask is stowed
        if mask is None:
            return 0
        for child, parent in enumerate(tree):
            if parent >= 0:
                mask[child] |= mask[parent]
            mask[child, child] = True
        depth = int(mask.sum(axis=1).max())
        self.scratch.stow(mask)
        return depth

    def lookahead(self, prompt: list[int]) -> Iterator[int]:
        row = self.rows.lease()  # clean: near miss, the generator's finally drops it even when closed half way
        if row < 0:
            return
        try:
            self.draft_model.prefill(row, prompt)
            last = prompt[-1]
            while True:
                toks = self.draft_model.extend(row, last, 1)
                if not toks:
                    return
                last = toks[0]
                yield last
        finally:
            self.rows.drop(row)

    def score(self, prompts: list[list[int]]) -> list[float]:
        scores = []
        row = self.rows.lease()  # clean: one row serves all prompts and is dropped at the end
        if row < 0:
            return scores
        for p in prompts:
            if not p:
                scores.append(0.0)
                continue
            self.rows.lengths[row] = 0
            scores.append(self.draft_model.logprob(row, p))
        self.rows.drop(row)
        return scores

    def park(self, req_id: int) -> None:
        """Preempted requests keep their row for a quick return."""
        if req_id in self.row_of and req_id not in self.parked:
            self.parked[req_id] = self.row_of.pop(req_id)

    def unpark(self, req_id: int) -> bool:
        if req_id in self.row_of:
            return True
        row = self.parked.pop(req_id, None)
        if row is None:
            row = self.rows.lease()  # clean: near miss, only without a parked row, then kept in row_of
            if row < 0:
                return False
        self.row_of[req_id] = row
        return True

    def shutdown(self) -> None:
        for req_id in list(self.row_of):
            self.detach(req_id)
        for req_id in list(self.parked):
            self.detach(req_id)
