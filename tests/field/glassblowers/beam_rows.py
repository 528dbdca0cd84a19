"""Static-cache decoding: rows of a dense KV cache, beams and their back pointers.

The cache has a fixed number of rows. A running hypothesis owns one row; finished
hypotheses keep only their tokens.
"""
import math
from typing import Dict, List, Optional, Set

import torch


class RowTable:
    """Rows of the dense cache, tracked as a boolean mask."""

    def __init__(self, n_rows: int):
        self.taken = torch.zeros(n_rows, dtype=torch.bool)

    def seat(self) -> Optional[int]:
        free = (~self.taken).nonzero()
        if free.numel() == 0:
            return None
        row = int(free[0])
        self.taken[row] = True
        return row

    def seat_many(self, n: int) -> List[int]:
        """Exactly n rows, or none at all."""
        rows = []
        for _ in range(n):
            row = self.seat()  # clean: near miss, unseated again unless all n were found
            if row is None:
                break
            rows.append(row)
        if len(rows) < n:
            self.unseat_all(rows)
            return []
        return rows

    def seat_near(self, row: int, span: int) -> Optional[int]:
        """A row at most `span` away, for cheaper copies."""
        other = self.seat()  # leak: a row that is too far away is not unseated
        if other is None:
            return None
        if abs(other - row) > span:
            return None
        return other

    def unseat(self, row: int) -> None:
        self.taken[row] = False

    def unseat_all(self, rows) -> None:
        for row in rows:
            self.unseat(row)


class Hyp:
    def __init__(self, row: int, tokens: List[int], score: float):
        self.row = row
        self.tokens = tokens
        self.score = score

    def normalized(self, alpha: float) -> float:
        return self.score / math.pow(len(self.tokens), alpha)


class BeamSearch:
    def __init__(self, cache: torch.Tensor, rows: RowTable, width: int, eos: int):
        self.cache = cache
        self.rows = rows
        self.width = width
        self.eos = eos
        self.live: Dict[str, List[Hyp]] = {}
        self.done: Dict[str, List[Hyp]] = {}

    def open(self, rid: str, prompt: List[int]) -> bool:
        row = self.rows.seat()  # clean: owned by the hypothesis in self.live, close() unseats
        if row is None:
            return False
        self.live[rid] = [Hyp(row, list(prompt), 0.0)]
        self.done[rid] = []
        return True

    def open_wide(self, rid: str, prompt: List[int]) -> bool:
        """Seat all beams at once instead of growing them."""
        rows = self.rows.seat_many(self.width)  # clean: empty on refusal, else one row per hypothesis
        if not rows:
            return False
        self.live[rid] = [Hyp(r, list(prompt), 0.0) for r in rows]
        self.done[rid] = []
        return True

    def open_diverse(self, rid: str, prompt: List[int], groups: int) -> bool:
        hyps = []
        for g in range(groups):
            row = self.rows.seat()  # leak: rows of the earlier groups are dropped when a later one finds none
            if row is None:
                return False
            hyps.append(Hyp(row, list(prompt), -0.1 * g))
        self.live[rid] = hyps
        self.done[rid] = []
        return True

    def advance(self, rid: str, expansions) -> None:
        """expansions: (hyp, token, score), best first, already cut to the width."""
        used: Set[int] = set()
        nxt: List[Hyp] = []
        for hyp, token, score in expansions:
            if token == self.eos:
                self.done[rid].append(Hyp(-1, hyp.tokens + [token], score))
                continue
            if hyp.row in used:
                row = self.rows.seat()  # clean: near miss, goes into nxt which becomes the live list
                if row is None:
                    continue
                self.cache[row].copy_(self.cache[hyp.row])
            else:
                row = hyp.row
                used.add(row)
            nxt.append(Hyp(row, hyp.tokens + [token], score))
        for hyp in self.live[rid]:
            if hyp.row not in used:
                self.rows.unseat(hyp.row)
        self.live[rid] = nxt

    def branch(self, rid: str, hyp: Hyp, token: int, floor: float) -> Optional[Hyp]:
        row = self.rows.seat()  # leak: a child below the score floor keeps its row seated
        if row is None:
            return None
        self.cache[row].copy_(self.cache[hyp.row])
        child = Hyp(row, hyp.tokens + [token], hyp.score)
        if child.score < floor:
            return None
        self.live[rid].append(child)
        return child

    def prune(self, rid: str, keep: int) -> None:
        ranked = sorted(self.live[rid], key=lambda h: h.score, reverse=True)
        self.live[rid] = ranked[:keep]
        for hyp in ranked[keep:]:
            self.rows.unseat(hyp.row)

    def relocate(self, rid: str, index: int) -> bool:
        """Move one hypothesis to the lowest free row."""
        hyp = self.live[rid][index]
        row = self.rows.seat()  # clean: near miss, either unseated or traded for the old row
        if row is None:
            return False
        if row > hyp.row:
            self.rows.unseat(row)
            return False
        self.cache[row].copy_(self.cache[hyp.row])
        hyp.row, row = row, hyp.row
        self.rows.unseat(row)
        return True

    def close(self, rid: str, alpha: float = 0.7) -> List[int]:
        live = self.live.pop(rid)
        pool = self.done.pop(rid) + live
        best = max(pool, key=lambda h: h.normalized(alpha))
        self.rows.unseat_all(h.row for h in live)
        return best.tokens


class ContrastiveStep:
    """Top-k look-ahead: each candidate is tried in its own row for one step."""

    def __init__(self, cache: torch.Tensor, rows: RowTable, model, k: int):
        self.cache = cache
        self.rows = rows
        self.model = model
        self.k = k

    def pick(self, base_row: int, candidates: List[int]) -> Optional[int]:
        lanes = self.rows.seat_many(min(self.k, len(candidates)))  # clean: unseated before both returns
        if not lanes:
            return None
        scores = []
        for lane, token in zip(lanes, candidates):
            self.cache[lane].copy_(self.cache[base_row])
            scores.append(self.model.step(self.cache[lane], token))
        self.rows.unseat_all(lanes)
        if max(scores) <= 0:
            return None
        return candidates[scores.index(max(scores))]

    def pick_first(self, base_row: int, candidates: List[int], bar: float) -> Optional[int]:
        """The first candidate over the bar."""
        for token in candidates:
            lane = self.rows.seat()  # leak: the winning candidate returns with its lane still seated
            if lane is None:
                return None
            self.cache[lane].copy_(self.cache[base_row])
            if self.model.step(self.cache[lane], token) > bar:
                return token
            self.rows.unseat(lane)
        return None

    def commit(self, base_row: int, candidates: List[int]) -> int:
        """Replace base_row by the best lane and return the row that is now in use."""
        best_row, best_score = base_row, -math.inf
        for token in candidates[: self.k]:
            lane = self.rows.seat()  # clean: near miss, the loser of each comparison is unseated
            if lane is None:
                break
            self.cache[lane].copy_(self.cache[base_row])
            score = self.model.step(self.cache[lane], token)
            if score > best_score:
                if best_row != base_row:
                    self.rows.unseat(best_row)
                best_row, best_score = lane, score
            else:
                self.rows.unseat(lane)
        if best_row != base_row:
            self.rows.unseat(base_row)
        return best_row

    def distances(self, base_row: int, candidates: List[int]) -> List[float]:
        out = []
        lane = None
        for token in candidates:
            lane = self.rows.seat()  # leak: lane is seated anew per candidate and only the last is unseated
            if lane is None:
                break
            self.cache[lane].copy_(self.cache[base_row])
            self.model.step(self.cache[lane], token)
            out.append(float((self.cache[lane] - self.cache[base_row]).norm()))
        if lane is not None:
            self.rows.unseat(lane)
        return out
