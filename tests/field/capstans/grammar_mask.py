# Structured output: compiled grammars, per-request matchers and the rows of the shared
# token bitmask that the sampler applies.
import heapq
import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Optional

import torch

logger = logging.getLogger("structured")


class BackendError(Exception):
    pass


class Matcher:
    def __init__(self, key: str, compiled: Any):
        self.key = key
        self.compiled = compiled
        self.state = 0
        self.dead = False

    def reset(self):
        self.state = 0

    def accept(self, token: int) -> bool:
        nxt = self.compiled.get((self.state, token))
        if nxt is None:
            self.dead = True
            return False
        self.state = nxt
        return True

    def fill(self, row: torch.Tensor):
        row.zero_()
        for (state, token) in self.compiled:
            if state == self.state:
                row[token >> 5] |= 1 << (token & 31)


class MatcherDepot:
    """Matchers are costly to build, so we keep up to `cap` of them for each grammar."""

    def __init__(self, compiled: Dict[str, Any], cap: int = 64):
        self.compiled = compiled
        self.cap = cap
        self.out = 0
        self._shelves: Dict[str, "queue.SimpleQueue[Matcher]"] = {}

    def checkout(self, key: str) -> Matcher:
        if self.out >= self.cap:
            raise BackendError("too many matchers")
        if key not in self.compiled:
            raise KeyError(key)
        shelf = self._shelves.setdefault(key, queue.SimpleQueue())
        try:
            m = shelf.get_nowait()  # clean: handed to the caller
        except queue.Empty:
            m = Matcher(key, self.compiled[key])
        self.out += 1
        return m

    def checkin(self, m: Matcher):
        m.reset()
        self.out -= 1
        self._shelves[m.key].put(m)


class MaskRows:
    """Lowest rows first, so that the copy to the device stays short."""

    def __init__(self, rows: int, vocab: int):
        self.table = torch.zeros(rows, (vocab + 31) // 32, dtype=torch.int32)
        self._heap = list(range(rows))
        self._mu = threading.Lock()

    def lend(self) -> Optional[int]:
        with self._mu:
            if not self._heap:
                return None
            return heapq.heappop(self._heap)  # clean: handed to the caller

    def lend_below(self, bound: int) -> Optional[int]:
        with self._mu:
            if not self._heap:
                return None
            row = heapq.heappop(self._heap)  # leak: a row at or over the bound is not pushed back
            if row >= bound:
                return None
            return row

    def lend_span(self, n: int) -> Optional[List[int]]:
        with self._mu:
            rows: List[int] = []
            while self._heap and len(rows) < n:
                rows.append(heapq.heappop(self._heap))  # clean: near miss, pushed back below if the span is short
            if len(rows) == n:
                return rows
            for r in rows:
                heapq.heappush(self._heap, r)
            return None

    def collect(self, row: int):
        with self._mu:
            heapq.heappush(self._heap, row)


class GrammarRequest:
    def __init__(self, rid: str, key: Optional[str]):
        self.rid = rid
        self.key = key
        self.matcher: Optional[Matcher] = None
        self.row: Optional[int] = None


class GrammarManager:
    def __init__(self, depot: MatcherDepot, rows: MaskRows, workers: int = 4):
        self.depot = depot
        self.rows = rows
        self.compile_permits = threading.BoundedSemaphore(workers)
        self.pool = ThreadPoolExecutor(workers)
        self.requests: Dict[str, GrammarRequest] = {}

    def attach(self, req: GrammarRequest) -> bool:
        if req.key is None or req.rid in self.requests:
            return True
        matcher = self.depot.checkout(req.key)  # leak: no row is left and the matcher is not checked in
        row = self.rows.lend()  # clean: moved into req.row, collected by detach()
        if row is None:
            return False
        req.matcher, req.row = matcher, row
        self.requests[req.rid] = req
        return True

    def attach_rows_first(self, req: GrammarRequest) -> bool:
        if req.rid in self.requests:
            return True
        row = self.rows.lend()  # clean: collected when no matcher is to be had, else moved into req
        if row is None:
            return False
        try:
            req.matcher = self.depot.checkout(req.key)  # clean: moved into req, checked in by detach()
        except (BackendError, KeyError) as e:
            logger.warning("no matcher for %s: %s", req.rid, e)
            self.rows.collect(row)
            return False
        req.row = row
        self.requests[req.rid] = req
        return True

    def detach(self, rid: str):
        req = self.requests.pop(rid, None)
        if req is None:
            return
        if req.matcher is not None:
            self.depot.checkin(req.matcher)
            req.matcher = None
        if req.row is not None:
            self.rows.collect(req.row)
            req.row = None

    def compile(self, key: str, source: str) -> bool:
        self.compile_permits.acquire()  # leak: the early return for known grammars keeps the permit
        if key in self.depot.compiled:
            return False
        try:
            self.depot.compiled[key] = self._build(source)
        finally:
            self.compile_permits.release()
        return True

    def compile_later(self, key: str, source: str):
        self.compile_permits.acquire()  # clean: near miss, released by the worker in _compile_job
        try:
            return self.pool.submit(self._compile_job, key, source)
        except RuntimeError:
            self.compile_permits.release()
            raise

    def _compile_job(self, key: str, source: str):
        try:
            self.depot.compiled[key] = self._build(source)
        finally:
            self.compile_permits.release()

    def try_compile(self, key: str, source: str) -> bool:
        if not self.compile_permits.acquire(blocking=False):  # clean: released in finally when it was got
            return False
        try:
            self.depot.compiled[key] = self._build(source)
            return True
        finally:
            self.compile_permits.release()

    @staticmethod
    def _build(source: str) -> Dict[Any, int]:
        return {(i, ord(ch)): i + 1 for i, ch in enumerate(source)}

    # checks of output that has been generated already

    def validates(self, key: str, tokens: List[int]) -> bool:
        m = self.depot.checkout(key)  # leak: the first refused token returns without checkin
        for t in tokens:
            if not m.accept(t):
                return False
        self.depot.checkin(m)
        return True

    def count_valid(self, key: str, outputs: List[List[int]]) -> int:
        m = self.depot.checkout(key)  # clean: near miss, the break leaves only the inner loop
        n = 0
        for tokens in outputs:
            m.reset()
            for t in tokens:
                if not m.accept(t):
                    break
            else:
                n += 1
        self.depot.checkin(m)
        return n

    def jump_forward(self, req: GrammarRequest, horizon: int) -> List[int]:
        probe = self.depot.checkout(req.key)  # clean: checked in in finally
        try:
            probe.state = req.matcher.state
            out: List[int] = []
            while len(out) < horizon:
                nexts = [tok for (st, tok) in probe.compiled if st == probe.state]
                if len(nexts) != 1:
                    return out
                out.append(nexts[0])
                probe.accept(nexts[0])
            return out
        finally:
            self.depot.checkin(probe)

    def rewind(self, req: GrammarRequest, tokens: List[int]) -> bool:
        """Rebuild the matcher after rejected draft tokens."""
        fresh = self.depot.checkout(req.key)  # leak: dropped when a token is refused
        for t in tokens:
            if not fresh.accept(t):
                logger.error("rewind of %s refused", req.rid)
                return False
        self.depot.checkin(req.matcher)
        req.matcher = fresh
        return True
