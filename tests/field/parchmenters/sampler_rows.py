"""Persistent sampler batch: fixed rows, penalty lanes and grammar matchers.

Rows are bits of an int. Lanes hold the output token counts of requests with a
repetition penalty. Matchers are compiled per schema and reused.
"""
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator


class RowBitmap:
    def __init__(self, n_rows: int):
        self.n_rows = n_rows
        self._used = 0

    def claim(self) -> int:
        """Lowest clear row, or -1."""
        for row in range(self.n_rows):
            if not self._used >> row & 1:
                self._used |= 1 << row
                return row
        return -1

    def vacate(self, row: int) -> None:
        self._used &= ~(1 << row)

    def count(self) -> int:
        return bin(self._used).count("1")


class PenaltyLanes:
    def __init__(self, n_lanes: int, vocab: int):
        self._idle = list(range(n_lanes))
        self._counts = [[0] * vocab for _ in range(n_lanes)]

    def open(self, prompt: Iterable[int]) -> int | None:
        if not self._idle:
            return None
        lane = self._idle.pop()  # clean: returned to the caller
        counts = self._counts[lane]
        for tok in prompt:
            counts[tok] += 1
        return lane

    def close(self, lane: int) -> None:
        counts = self._counts[lane]
        for i in range(len(counts)):
            counts[i] = 0
        self._idle.append(lane)


class GrammarShelf:
    """Compiled matchers by schema. A matcher serves one request at a time."""

    def __init__(self, compile_fn, max_live: int = 256):
        self.compile_fn = compile_fn
        self.max_live = max_live
        self._live = 0
        self._by_schema: dict[str, list[Any]] = defaultdict(list)

    def check_out(self, schema: str) -> Any:
        if self._by_schema[schema]:
            matcher = self._by_schema[schema].pop()  # clean: returned to the caller after a reset
            matcher.reset()
            return matcher
        if self._live >= self.max_live:
            return None
        self._live += 1
        return self.compile_fn(schema)

    def check_in(self, schema: str, matcher: Any) -> None:
        self._by_schema[schema].append(matcher)


@dataclass
class Req:
    rid: str
    prompt: list[int]
    rep_penalty: float = 1.0
    schema: str | None = None
    row: int = -1
    lane: int | None = None
    matcher: Any = None
    aborted: bool = False
    out: list[int] = field(default_factory=list)


class SamplerBatch:
    def __init__(self, rows: RowBitmap, lanes: PenaltyLanes, shelf: GrammarShelf):
        self.rows = rows
        self.lanes = lanes
        self.shelf = shelf
        self.by_row: dict[int, Req] = {}

    def admit(self, req: Req) -> bool:
        row = self.rows.claim()  # leak: not vacated when the penalty lanes are all taken
        if row < 0:
            return False
        if req.rep_penalty != 1.0:
            lane = self.lanes.open(req.prompt)  # clean: near miss, closed in finish() under the same condition
            if lane is None:
                return False
            req.lane = lane
        req.row = row
        self.by_row[row] = req
        return True

    def constrain(self, req: Req) -> bool:
        """Attach a matcher to a request that is already in the batch."""
        if req.schema is None or req.matcher is not None:
            return True
        matcher = self.shelf.check_out(req.schema)  # leak: finish() checks nothing in for an aborted request
        if matcher is None:
            return False
        req.matcher = matcher
        return True

    def finish(self, req: Req) -> None:
        del self.by_row[req.row]
        self.rows.vacate(req.row)
        if req.rep_penalty != 1.0:
            self.lanes.close(req.lane)
            req.lane = None
        if req.matcher is not None and not req.aborted:
            self.shelf.check_in(req.schema, req.matcher)
            req.matcher = None
        req.row = -1

    def abort(self, rid: str) -> None:
        for req in list(self.by_row.values()):
            if req.rid == rid:
                req.aborted = True
                self.finish(req)

    def compact(self) -> int:
        """Move the top rows into holes so the decode graph can run a smaller batch."""
        moves = 0
        for src in sorted(self.by_row, reverse=True):
            dst = self.rows.claim()  # clean: either vacated again or it is the request's new row
            if dst < 0:
                break
            if dst > src:
                self.rows.vacate(dst)
                break
            req = self.by_row.pop(src)
            self.rows.vacate(src)
            req.row = dst
            self.by_row[dst] = req
            moves += 1
        return moves

    def reserve_beams(self, n: int) -> list[int] | None:
        got: list[int] = []
        while len(got) < n:
            row = self.rows.claim()  # clean: rows got so far are vacated when one is missing, else all are returned
            if row < 0:
                for r in got:
                    self.rows.vacate(r)
                return None
            got.append(row)
        return got

    def reserve_guided_pair(self) -> tuple[int, int] | None:
        """Conditional and unconditional rows for guidance."""
        cond = self.rows.claim()  # leak: stays claimed when the second row is missing
        uncond = self.rows.claim()  # clean: near miss, it is only had when the first one was had too
        if cond < 0 or uncond < 0:
            return None
        return cond, uncond

    def hand_over(self, req: Req, other: "SamplerBatch", ship) -> bool:
        """Move a running request to a sibling batch over the same lanes and shelf."""
        row = other.rows.claim()  # leak: not vacated over there when shipping fails
        if row < 0:
            return False
        if not ship(req, row):
            return False
        del self.by_row[req.row]
        self.rows.vacate(req.row)
        req.row = row
        other.by_row[row] = req
        return True

    def probe_rows(self, prompts: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
        """A row per prompt for the time the consumer looks at it."""
        for prompt in prompts:
            row = self.rows.claim()  # clean: near miss, vacated in finally even when the consumer stops early
            if row < 0:
                return
            try:
                yield row, prompt
            finally:
                self.rows.vacate(row)


class RowLease:
    """``with RowLease(rows) as row`` for one-off sampling outside the batch."""

    def __init__(self, rows: RowBitmap, stats: dict):
        self._rows = rows
        self._stats = stats
        self.row = -1

    def __enter__(self) -> int:
        self.row = self._rows.claim()  # leak: __exit__ returns before vacate() when the body raised
        if self.row < 0:
            raise BlockingIOError("sampler batch is full")
        return self.row

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            self._stats[exc_type.__name__] = self._stats.get(exc_type.__name__, 0) + 1
            return False
        self._rows.vacate(self.row)
        return False


class LaneGuard:
    def __init__(self, lanes: PenaltyLanes, prompt: list[int]):
        self._lanes = lanes
        self._prompt = prompt
        self._lane: int | None = None

    def __enter__(self) -> int | None:
        self._lane = self._lanes.open(self._prompt)  # clean: __exit__ closes it
        return self._lane

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._lane is None:
            return False
        self._lanes.close(self._lane)
        self._lane = None
        return exc_type is TimeoutError


class OneShotSampler:
    def __init__(self, rows: RowBitmap, lanes: PenaltyLanes, logits_fn):
        self.rows = rows
        self.lanes = lanes
        self.logits_fn = logits_fn
        self.stats: dict[str, int] = {}
        self.mu = threading.Lock()

    def sample(self, prompt: list[int]) -> int:
        with RowLease(self.rows, self.stats) as row:  # leak: its __exit__ keeps the row when the empty-logits error is raised
            logits = self.logits_fn(row, prompt)
            if not logits:
                raise ValueError("empty logits")
            return max(range(len(logits)), key=logits.__getitem__)

    def sample_penalised(self, row: int, prompt: list[int]) -> int | None:
        with LaneGuard(self.lanes, prompt) as lane:  # clean: closed on every exit
            if lane is None:
                return None
            logits = self.logits_fn(row, prompt)
            if not logits:
                raise ValueError("empty logits")
            return max(range(len(logits)), key=logits.__getitem__)
