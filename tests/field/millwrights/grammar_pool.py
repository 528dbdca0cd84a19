"""Constrained decoding: matchers are rented per request, bitmask rows per step."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Optional, Union

log = logging.getLogger("grammar")


class Matcher:
    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.position = 0
        self.done = False

    def advance(self, token: int) -> bool:
        self.position += 1
        self.done = token == 2
        return token >= 0

    def rollback(self, n: int) -> None:
        self.position = max(0, self.position - n)
        self.done = False


class MatcherPool:
    """Matchers are expensive to build; a bounded number exists per grammar."""

    def __init__(self, per_grammar: int) -> None:
        self.per_grammar = per_grammar
        self._idle: dict[str, list[Matcher]] = {}
        self._made: dict[str, int] = {}
        self._lock = threading.Lock()

    def rent(self, grammar: str) -> Optional[Matcher]:
        with self._lock:
            idle = self._idle.setdefault(grammar, [])
            if idle:
                return idle.pop()
            if self._made.get(grammar, 0) >= self.per_grammar:
                return None
            self._made[grammar] = self._made.get(grammar, 0) + 1
            return Matcher(grammar)

    def back(self, m: Matcher) -> None:
        m.rollback(m.position)
        with self._lock:
            self._idle.setdefault(m.grammar, []).append(m)


class BitmaskRows:
    def __init__(self, rows: int) -> None:
        self._free = set(range(rows))

    def alloc(self) -> int:
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.add(row)

    def available(self) -> int:
        return len(self._free)


@dataclass
class GrammarRequest:
    rid: str
    spec: str
    matcher: Union[Matcher, "Future[Optional[Matcher]]", None] = None
    row: Optional[int] = None
    backup: Optional[Matcher] = None


class GrammarBackend:
    def __init__(self, pool: MatcherPool, rows: BitmaskRows) -> None:
        self.pool = pool
        self.rows = rows
        self.executor = ThreadPoolExecutor(4)
        self.waiting: list[GrammarRequest] = []
        self.live: dict[str, GrammarRequest] = {}
        self.aborted: set[str] = set()

    # -- lifecycle of requests -------------------------------------------------------------------

    def _compile(self, spec: str) -> Optional[Matcher]:
        normalized = " ".join(spec.split())
        return self.pool.rent(normalized)  # clean: handed on

    def _return_result(self, fut: "Future[Optional[Matcher]]") -> None:
        m = fut.result()
        if m is not None:
            self.pool.back(m)

    def enqueue(self, req: GrammarRequest) -> None:
        req.matcher = self.executor.submit(self._compile, req.spec)  # clean: near miss, poll moves or gives back the result
        self.waiting.append(req)

    def poll(self) -> list[GrammarRequest]:
        ready, still = [], []
        for req in self.waiting:
            if req.rid in self.aborted:
                req.matcher.add_done_callback(self._return_result)
                continue
            if not req.matcher.done():
                still.append(req)
                continue
            req.matcher = req.matcher.result()
            if req.matcher is None:
                log.info("no matcher for %s", req.rid)
                continue
            self.live[req.rid] = req
            ready.append(req)
        self.waiting = still
        return ready

    def abort(self, rid: str) -> None:
        if rid in self.live:
            self.finish(rid)
        else:
            self.aborted.add(rid)

    def start_sync(self, req: GrammarRequest) -> bool:
        m = self._compile(req.spec)  # leak: lost when there is no mask row
        if m is None:
            return False
        if self.rows.available() == 0:
            return False
        req.row = self.rows.alloc()  # clean: finish frees it
        req.matcher = m
        self.live[req.rid] = req
        return True

    def start_checked(self, req: GrammarRequest) -> bool:
        if self.rows.available() == 0:
            return False
        m = self._compile(req.spec)  # clean: near miss, the rows are looked at before
        if m is None:
            return False
        req.row = self.rows.alloc()  # clean: finish frees it
        req.matcher = m
        self.live[req.rid] = req
        return True

    def start_with_backup(self, req: GrammarRequest) -> bool:
        """A second matcher allows jump-forward without rollback."""
        req.matcher = self._compile(req.spec)  # clean: given back at once or by finish
        if req.matcher is None:
            return False
        req.backup = self.pool.rent(req.spec)  # leak: finish gives req.matcher back and leaves req.backup
        if req.backup is None:
            self.pool.back(req.matcher)
            req.matcher = None
            return False
        self.live[req.rid] = req
        return True

    def finish(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        if isinstance(req.matcher, Matcher):
            self.pool.back(req.matcher)
            req.matcher = None
        if req.row is not None:
            self.rows.free(req.row)
            req.row = None

    # -- steps -----------------------------------------------------------------------------------

    def accept(self, req: GrammarRequest, tokens: list[int]) -> int:
        for i, token in enumerate(tokens):
            if not req.matcher.advance(token):
                return i
        return len(tokens)

    def fill_masks(self, reqs: list[GrammarRequest]) -> dict[str, int]:
        """A row per request for one step; done_with_masks takes them back."""
        rows: dict[str, int] = {}
        for req in reqs:
            if self.rows.available() == 0:
                break
            rows[req.rid] = self.rows.alloc()  # clean: handed to the caller in the dict
        return rows

    def done_with_masks(self, rows: dict[str, int]) -> None:
        for row in rows.values():
            self.rows.free(row)
        rows.clear()

    def step(self, reqs: list[GrammarRequest], tokens: dict[str, int]) -> list[str]:
        rows = self.fill_masks(reqs)  # clean: done_with_masks after the loop
        stopped = []
        for req in reqs:
            if req.rid not in rows:
                continue
            if self.accept(req, [tokens[req.rid]]) == 0 or req.matcher.done:
                stopped.append(req.rid)
        self.done_with_masks(rows)
        return stopped

    def step_popping(self, reqs: list[GrammarRequest], tokens: dict[str, int]) -> list[str]:
        rows = self.fill_masks(reqs)  # leak: rows of stopped requests are popped out before the dict is given back
        stopped = []
        for req in reqs:
            if req.rid in rows and self.accept(req, [tokens[req.rid]]) == 0:
                rows.pop(req.rid)
                stopped.append(req.rid)
        self.done_with_masks(rows)
        return stopped

    def step_removing(self, reqs: list[GrammarRequest], tokens: dict[str, int]) -> list[str]:
        rows = self.fill_masks(reqs)  # clean: near miss, what is popped is freed at once
        stopped = []
        for req in reqs:
            if req.rid in rows and self.accept(req, [tokens[req.rid]]) == 0:
                self.rows.free(rows.pop(req.rid))
                stopped.append(req.rid)
        self.done_with_masks(rows)
        return stopped

    # -- tools -----------------------------------------------------------------------------------

    def validate(self, spec: str, tokens: list[int]) -> bool:
        m = self._compile(spec)  # leak: a rejected token returns False before the matcher goes back
        if m is None:
            return False
        for token in tokens:
            if not m.advance(token):
                return False
        ok = m.done
        self.pool.back(m)
        return ok

    def longest_prefix(self, spec: str, tokens: list[int]) -> int:
        m = self._compile(spec)  # clean: near miss, a rejected token only ends the loop
        if m is None:
            return 0
        n = 0
        for token in tokens:
            if not m.advance(token):
                break
            n += 1
        self.pool.back(m)
        return n

    def first_matching(self, specs: list[str], tokens: list[int]) -> Optional[Matcher]:
        for spec in specs:
            m = self._compile(spec)  # clean: near miss, the matching one is handed on, the others go back
            if m is None:
                continue
            if all(m.advance(t) for t in tokens):
                return m
            self.pool.back(m)
        return None

    def classify(self, specs: dict[str, str], tokens: list[int]) -> Optional[str]:
        found = self.first_matching(list(specs.values()), tokens)  # leak: only the label of the grammar goes out
        if found is None:
            return None
        for label, spec in specs.items():
            if " ".join(spec.split()) == found.grammar:
                return label
        return None

    def adopt(self, req: GrammarRequest, specs: list[str], tokens: list[int]) -> bool:
        found = self.first_matching(specs, tokens)  # clean: moved to the request, finish gives it back
        if found is None:
            return False
        req.matcher = found
        self.live[req.rid] = req
        return True

    def shutdown(self) -> None:
        for rid in list(self.live):
            self.finish(rid)
        for req in self.waiting:
            self._return_result(req.matcher)
        self.waiting.clear()
        self.executor.shutdown()
