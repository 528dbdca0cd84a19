"""Structured output: matchers and bitmask rows for constrained requests."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Dict, Generic, List, Optional, Set, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class ObjectPool(Generic[T]):
    def __init__(self, build: Callable[[], T], limit: int) -> None:
        self._build = build
        self._limit = limit
        self._made = 0
        self._spare: List[T] = []
        self._lock = threading.Lock()

    def rent(self) -> Optional[T]:
        with self._lock:
            if self._spare:
                return self._spare.pop()
            if self._made == self._limit:
                return None
            self._made += 1
            return self._build()

    def hand_in(self, obj: T) -> None:
        with self._lock:
            self._spare.append(obj)


class Matcher:
    def __init__(self) -> None:
        self.grammar = ""
        self.at = 0

    def load(self, grammar: str) -> bool:
        self.grammar, self.at = grammar, 0
        return bool(grammar)

    def advance(self, token: int) -> bool:
        self.at += 1
        return token != 0

    def finished(self) -> bool:
        return self.at >= len(self.grammar)


class MaskRows:
    """Rows of the batch's bitmask."""

    def __init__(self, rows: int, words: int) -> None:
        self.words = [[-1] * words for _ in range(rows)]
        self._open: Set[int] = set(range(rows))

    def assign_row(self) -> int:
        return self._open.pop() if self._open else -1

    def clear_row(self, row: int) -> None:
        self.words[row] = [-1] * len(self.words[row])
        self._open.add(row)


@dataclass
class Constrained:
    rid: int
    grammar: str
    matcher: Optional[Matcher] = None
    row: int = -1
    history: List[int] = field(default_factory=list)


class MatcherGuard:
    """A matcher for the time of a with block; keep() takes it out of the guard."""

    def __init__(self, pool: "ObjectPool[Matcher]") -> None:
        self._pool = pool
        self._matcher: Optional[Matcher] = None

    def __enter__(self) -> "MatcherGuard":
        self._matcher = self._pool.rent()  # clean: near miss, handed in by __exit__ unless keep took it
        return self

    @property
    def matcher(self) -> Optional[Matcher]:
        return self._matcher

    def keep(self) -> Optional[Matcher]:
        kept, self._matcher = self._matcher, None
        return kept

    def __exit__(self, *exc: object) -> None:
        if self._matcher is not None:
            self._pool.hand_in(self._matcher)


class GrammarManager:
    def __init__(self, matchers: "ObjectPool[Matcher]", rows: MaskRows, threads: int = 2) -> None:
        self.matchers = matchers
        self.rows = rows
        self._exec = ThreadPoolExecutor(threads)
        self.active: Dict[int, Constrained] = {}
        self._compiling: Dict[int, "Future[Optional[Matcher]]"] = {}

    # compile -----------------------------------------------------------------

    def _compile(self, grammar: str) -> Optional[Matcher]:
        matcher = self.matchers.rent()  # clean: handed in when it does not load, else handed to the caller
        if matcher is None:
            return None
        if not matcher.load(grammar):
            self.matchers.hand_in(matcher)
            return None
        return matcher

    def request(self, rid: int, grammar: str) -> None:
        if rid in self._compiling:
            return
        self._compiling[rid] = self._exec.submit(self._compile, grammar)

    def collect(self) -> List[int]:
        started = []
        for rid, fut in list(self._compiling.items()):
            if not fut.done():
                continue
            del self._compiling[rid]
            matcher = fut.result()
            if matcher is None:
                continue
            row = self.rows.assign_row()  # clean: in active, finish clears it
            if row < 0:
                self.matchers.hand_in(matcher)
                continue
            self.active[rid] = Constrained(rid, "", matcher, row)
            started.append(rid)
        return started

    def start_now(self, req: Constrained) -> bool:
        matcher = self._compile(req.grammar)  # leak: not handed in when there is no row
        if matcher is None:
            return False
        row = self.rows.assign_row()  # clean: in req.row, finish clears it
        if row == -1:
            log.info("no mask row for %d", req.rid)
            return False
        req.matcher, req.row = matcher, row
        self.active[req.rid] = req
        return True

    def start_guarded(self, req: Constrained) -> bool:
        with MatcherGuard(self.matchers) as guard:  # clean: near miss, kept only when the request starts
            if guard.matcher is None or not guard.matcher.load(req.grammar):
                return False
            req.row = self.rows.assign_row()  # clean: finish clears it
            if req.row < 0:
                return False
            req.matcher = guard.keep()
        self.active[req.rid] = req
        return True

    def finish(self, rid: int) -> None:
        req = self.active.pop(rid)
        self.matchers.hand_in(req.matcher)
        self.rows.clear_row(req.row)

    # stepping ------------------------------------------------------------------

    def accept(self, rid: int, token: int) -> bool:
        req = self.active[rid]
        req.history.append(token)
        if not req.matcher.advance(token) or req.matcher.finished():
            self.finish(rid)
            return False
        return True

    def fill_masks(self, rids: List[int]) -> int:
        filled = 0
        for rid in rids:
            extra = self.rows.assign_row()  # leak: break for an unknown request leaves the extra row assigned
            if extra < 0:
                break
            req = self.active.get(rid)
            if req is None:
                break
            self.rows.words[extra] = [w & req.matcher.at for w in self.rows.words[req.row]]
            filled += sum(1 for w in self.rows.words[extra] if w)
            self.rows.clear_row(extra)
        return filled

    def swap_grammar(self, rid: int, grammar: str) -> bool:
        req = self.active[rid]
        fresh = self._compile(grammar)  # leak: return False when the last token does not fit the new grammar
        if fresh is None:
            return False
        if req.history and not fresh.advance(req.history[-1]):
            return False
        self.matchers.hand_in(req.matcher)
        req.matcher = fresh
        req.grammar = grammar
        return True

    def restart(self, rid: int) -> bool:
        req = self.active[rid]
        fresh = self._compile(req.grammar)  # clean: replaces req.matcher, which is handed in
        if fresh is None:
            return False
        self.matchers.hand_in(req.matcher)
        req.matcher = fresh
        req.history.clear()
        return True

    # checks ----------------------------------------------------------------------

    def validates(self, grammar: str, tokens: List[int]) -> bool:
        matcher = self._compile(grammar)  # leak: return False at the first bad token
        if matcher is None:
            return False
        for token in tokens:
            if not matcher.advance(token):
                return False
        ok = matcher.finished()
        self.matchers.hand_in(matcher)
        return ok

    def prefix_ok(self, grammar: str, tokens: List[int]) -> bool:
        matcher = self._compile(grammar)  # clean: near miss, all() stops early but hand_in follows
        if matcher is None:
            return False
        ok = all(matcher.advance(token) for token in tokens)
        self.matchers.hand_in(matcher)
        return ok

    def compiles(self, text: str) -> bool:
        return self._compile(text) is not None  # leak: the matcher is compared with None and dropped

    def longest_match(self, texts: List[str], tokens: List[int]) -> Optional[str]:
        table: Dict[str, Matcher] = {}
        for text in texts:
            matcher = self._compile(text)  # leak: only the winner is popped and handed in
            if matcher is not None:
                table[text] = matcher
        best, reach = None, -1
        for text, matcher in table.items():
            for token in tokens:
                if not matcher.advance(token):
                    break
            if matcher.at > reach:
                best, reach = text, matcher.at
        if best is not None:
            self.matchers.hand_in(table.pop(best))
        return best
