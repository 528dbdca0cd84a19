"""Speculative decoding: draft slots, verification and the accept loop."""
from __future__ import annotations

import abc
import random
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


class DraftSlotTable:
    """Rows of the draft model's static KV tensor. -1 from ``claim`` means full."""

    def __init__(self, rows: int) -> None:
        self._vacant = list(range(rows))[::-1]
        self._busy: set = set()

    def claim(self) -> int:
        if not self._vacant:
            return -1
        row = self._vacant.pop()
        self._busy.add(row)
        return row

    def claim_pair(self) -> Optional[Tuple[int, int]]:
        a = self.claim()  # leak: kept when the second row cannot be had
        b = self.claim()  # clean: near miss, when a is -1 the table was full and b is -1 too
        if a < 0 or b < 0:
            return None
        return a, b

    def retire(self, row: int) -> None:
        self._busy.discard(row)
        self._vacant.append(row)

    def __len__(self) -> int:
        return len(self._vacant)


@dataclass
class SpecRequest:
    rid: str
    tokens: List[int]
    max_new: int = 64
    row: int = -1
    use_draft: bool = True
    window: int = 4
    stats: Dict[str, int] = field(default_factory=lambda: {"accepted": 0, "rejected": 0})


class RowHolder:
    """Mixin for everything that parks rows by request id."""

    table: DraftSlotTable
    rows: Dict[str, int]

    def _park(self, rid: str, row: int) -> None:
        self.rows[rid] = row

    def _unpark(self, rid: str) -> None:
        row = self.rows.pop(rid, -1)
        if row >= 0:
            self.table.retire(row)


class Proposer(abc.ABC):
    @abc.abstractmethod
    def begin(self, req: SpecRequest) -> bool: ...

    @abc.abstractmethod
    def propose(self, req: SpecRequest) -> List[int]: ...

    @abc.abstractmethod
    def end(self, req: SpecRequest) -> None: ...


class ModelProposer(RowHolder, Proposer):
    def __init__(self, table: DraftSlotTable, vocab: int = 97) -> None:
        self.table = table
        self.rows: Dict[str, int] = {}
        self.vocab = vocab

    def begin(self, req: SpecRequest) -> bool:
        row = self.table.claim()  # clean: parked under the request id
        if row < 0:
            return False
        self._park(req.rid, row)
        return True

    def propose(self, req: SpecRequest) -> List[int]:
        seed = req.tokens[-1] if req.tokens else 0
        return [(seed * 31 + i) % self.vocab for i in range(req.window)]

    def end(self, req: SpecRequest) -> None:
        self._unpark(req.rid)


class LookaheadProposer(Proposer):
    """N-gram proposer with one row for the request and one transient row a step."""

    def __init__(self, table: DraftSlotTable) -> None:
        self.table = table

    def begin(self, req: SpecRequest) -> bool:
        if not req.use_draft:
            return True
        req.row = self.table.claim()  # clean: near miss, end() retires under the row's own sign
        return req.row >= 0

    def propose(self, req: SpecRequest) -> List[int]:
        tmp = self.table.claim()  # leak: short prompts return before retire
        if tmp < 0:
            return []
        if len(req.tokens) < 3:
            return []
        gram = req.tokens[-3:]
        self.table.retire(tmp)
        return gram[: req.window]

    def end(self, req: SpecRequest) -> None:
        if req.row >= 0:
            self.table.retire(req.row)
            req.row = -1


class TreeProposer(Proposer):
    """Branching drafts: each branch owns a row for the length of one step."""

    def __init__(self, table: DraftSlotTable, branches: int = 3) -> None:
        self.table = table
        self.branches = branches
        self.trunk: Dict[str, Tuple[int, int]] = {}

    def begin(self, req: SpecRequest) -> bool:
        pair = self.table.claim_pair()  # clean: kept in trunk, retired in end
        if pair is None:
            return False
        self.trunk[req.rid] = pair
        return True

    def propose(self, req: SpecRequest) -> List[int]:
        best: List[int] = []
        rows: List[int] = []
        for i in range(self.branches):
            row = self.table.claim()  # clean: near miss, break leaves the loop only with -1
            if row < 0:
                break
            rows.append(row)
            cand = [(t + i) % 97 for t in req.tokens[-req.window:]]
            if sum(cand) > sum(best):
                best = cand
        for row in rows:
            self.table.retire(row)
        return best

    def propose_greedy(self, req: SpecRequest) -> List[int]:
        for i in range(self.branches):
            row = self.table.claim()  # leak: an empty candidate continues without retire
            if row < 0:
                return []
            cand = [(t + i) % 97 for t in req.tokens[-req.window:] if t % (i + 2)]
            if not cand:
                continue
            self.table.retire(row)
            return cand
        return []

    def end(self, req: SpecRequest) -> None:
        pair = self.trunk.pop(req.rid, None)
        if pair is not None:
            for row in pair:
                self.table.retire(row)


def verify(req: SpecRequest, draft: List[int], rng: random.Random) -> int:
    n = 0
    for tok in draft:
        if rng.random() < 0.3:
            break
        req.tokens.append(tok)
        n += 1
    req.stats["accepted"] += n
    req.stats["rejected"] += len(draft) - n
    return n


def run_request(req: SpecRequest, proposer: Proposer, rng: random.Random) -> List[int]:
    drafting = req.use_draft and proposer.begin(req)  # clean: near miss, the same flag guards end()
    start = len(req.tokens)
    while len(req.tokens) - start < req.max_new:
        draft = proposer.propose(req) if drafting else []
        if not verify(req, draft, rng):
            req.tokens.append(rng.randrange(97))
    if drafting:
        proposer.end(req)
    return req.tokens[start:]


def run_until_eos(req: SpecRequest, proposer: Proposer, eos: int, rng: random.Random) -> List[int]:
    if not proposer.begin(req):  # leak: reaching the token limit returns without end
        return []
    out: List[int] = []
    while True:
        draft = proposer.propose(req)
        verify(req, draft, rng)
        out.extend(draft)
        if eos in out:
            proposer.end(req)
            return out[: out.index(eos)]
        if len(out) >= req.max_new or not draft:
            return out


def adopt(req: SpecRequest, table: DraftSlotTable) -> bool:
    """Give a request that arrived from another worker a local row."""
    req.row = table.claim()  # leak: row number overwritten with -1 when a request without draft is refused
    if req.row < 0:
        return False
    if not req.use_draft:
        req.row = -1
        return False
    return True


def migrate_row(req: SpecRequest, src: DraftSlotTable, dst: DraftSlotTable) -> bool:
    row = dst.claim()  # clean: moved into the request
    if row < 0:
        return False
    old, req.row = req.row, row
    if old >= 0:
        src.retire(old)
    return True
