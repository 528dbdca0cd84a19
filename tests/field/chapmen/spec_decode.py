"""Speculative decoding: draft sessions, scratch tensors and verification."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Callable, Deque, List, Optional, Sequence, Tuple

import torch

logger = logging.getLogger(__name__)

Verify = Callable[[torch.Tensor, Sequence[int]], int]


class ScratchRing:
    """A ring of equally sized scratch rows on the device."""

    def __init__(self, rows: int, width: int, device: str = "cuda") -> None:
        self.storage = torch.empty(rows, width, dtype=torch.float32, device=device)
        self._vacant: Deque[int] = deque(range(rows))

    def checkout_row(self) -> Optional[int]:
        return self._vacant.popleft() if self._vacant else None

    def return_row(self, row: int) -> None:
        self._vacant.append(row)

    def view(self, row: int) -> torch.Tensor:
        return self.storage[row]


class ScratchRow:
    """Context manager for one row; row is None when the ring is exhausted."""

    def __init__(self, ring: ScratchRing) -> None:
        self.ring = ring
        self.row: Optional[int] = None

    def __enter__(self) -> Optional[torch.Tensor]:
        self.row = self.ring.checkout_row()  # clean: __exit__ returns it
        return None if self.row is None else self.ring.view(self.row)

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.row is not None:
            self.ring.return_row(self.row)
            self.row = None
        return False


class TracedScratchRow:
    """Like ScratchRow, and counts the rows that saw an exception."""

    errors = 0

    def __init__(self, ring: ScratchRing, trace: bool) -> None:
        self.ring = ring
        self.trace = trace
        self.row: Optional[int] = None

    def __enter__(self) -> Optional[torch.Tensor]:
        self.row = self.ring.checkout_row()  # leak: __exit__ returns before return_row unless tracing is on
        return None if self.row is None else self.ring.view(self.row)

    def __exit__(self, exc_type, exc, tb) -> bool:
        if not self.trace:
            return False
        if exc_type is not None:
            TracedScratchRow.errors += 1
        if self.row is not None:
            self.ring.return_row(self.row)
        return False


@dataclass
class DraftSession:
    rid: str
    row: int
    proposed: List[int] = field(default_factory=list)
    accepted: int = 0
    rounds: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.rounds)


class DraftManager:
    def __init__(self, ring: ScratchRing, verify: Verify, depth: int, keep: int = 32) -> None:
        self.ring = ring
        self.verify = verify
        self.depth = depth
        self.keep = keep
        self.sessions: "OrderedDict[str, DraftSession]" = OrderedDict()
        self.history: Deque[Tuple[str, int]] = deque(maxlen=8)

    def session(self, rid: str) -> Optional[DraftSession]:
        known = self.sessions.get(rid)
        if known is not None:
            self.sessions.move_to_end(rid)
            return known
        row = self.ring.checkout_row()  # clean: near miss, the session's row, trim() and end() return it
        if row is None:
            return None
        made = self.sessions[rid] = DraftSession(rid, row)
        self.trim()
        return made

    def trim(self) -> None:
        while len(self.sessions) > self.keep:
            _, oldest = self.sessions.popitem(last=False)
            self.ring.return_row(oldest.row)

    def end(self, rid: str) -> float:
        session = self.sessions.pop(rid, None)
        if session is None:
            return 0.0
        self.ring.return_row(session.row)
        return session.rate

    def remember(self, rid: str) -> bool:
        """Keeps the draft logits of the most recent requests for analysis."""
        row = self.ring.checkout_row()  # leak: the bounded deque pushes the oldest row out unreturned
        if row is None:
            return False
        self.ring.view(row).zero_()
        self.history.append((rid, row))
        return True

    def forget_history(self) -> None:
        while self.history:
            _, row = self.history.popleft()
            self.ring.return_row(row)

    def score(self, logits: torch.Tensor, tokens: Sequence[int]) -> float:
        with ScratchRow(self.ring) as scratch:  # clean: __exit__ returns the row, early return included
            if scratch is None:
                return 0.0
            scratch[:logits.numel()].copy_(logits.flatten())
            return float(scratch[list(tokens)].sum())

    def propose(self, rid: str, logits: torch.Tensor) -> List[int]:
        session = self.session(rid)  # clean: owned by the sessions table
        if session is None:
            return []
        view = self.ring.view(session.row)
        view[:logits.numel()].copy_(logits.flatten())
        session.proposed = view[:logits.numel()].topk(self.depth).indices.tolist()
        return session.proposed

    def verify_round(self, rid: str) -> int:
        session = self.sessions.get(rid)
        if session is None:
            return 0
        row = self.ring.checkout_row()  # leak: not returned when a futile round ends the session
        if row is None:
            return 0
        got = self.verify(self.ring.view(row), session.proposed)
        session.rounds += 1
        if got == 0 and session.rounds > 3:
            self.end(rid)
            return 0
        session.accepted += got
        self.ring.return_row(row)
        return got

    def tree_rows(self, width: int, depth: int) -> List[List[int]]:
        """Rows for a token tree, level by level, as far as the ring allows."""
        levels: List[List[int]] = []
        for level in range(depth):
            rows: List[int] = []
            while len(rows) < min(width ** level, 8):
                row = self.ring.checkout_row()  # clean: full levels are handed on, the last undone
                if row is None:
                    for back in rows:
                        self.ring.return_row(back)
                    return levels
                rows.append(row)
            levels.append(rows)
        return levels

    def verify_tree(self, logits: torch.Tensor, width: int, depth: int) -> int:
        levels = self.tree_rows(width, depth)  # clean: near miss, nested loops return every row
        best = 0
        for rows in levels:
            for row in rows:
                best = max(best, self.verify(self.ring.view(row), [row]))
        for rows in levels:
            for row in rows:
                self.ring.return_row(row)
        return best

    def verify_tree_greedy(self, logits: torch.Tensor, width: int, depth: int) -> int:
        levels = self.tree_rows(width, depth)  # leak: only the first row of each level is returned
        best = 0
        for rows in levels:
            for row in rows:
                best = max(best, self.verify(self.ring.view(row), [row]))
            self.ring.return_row(rows[0])
        return best

    def compare_drafts(self, left: torch.Tensor, right: torch.Tensor) -> float:
        a = self.ring.checkout_row()  # clean: near miss, both returns look at what was obtained
        b = self.ring.checkout_row() if a is not None else None  # clean: near miss, returned if there
        gap = -1.0
        if a is not None and b is not None:
            self.ring.view(a)[:left.numel()].copy_(left)
            self.ring.view(b)[:right.numel()].copy_(right)
            gap = float((self.ring.view(a) - self.ring.view(b)).abs().max())
        for row in (a, b):
            if row is not None:
                self.ring.return_row(row)
        return gap
