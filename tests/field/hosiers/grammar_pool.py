"""Structured output: compiled grammar registry, matcher pool and token bitmask rows."""
from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional


class GrammarKey(NamedTuple):
    kind: str
    source: str


@dataclass
class Compiled:
    key: GrammarKey
    states: int
    refs: int = 0


class Matcher:
    def __init__(self) -> None:
        self.grammar: Optional[Compiled] = None
        self.pos = 0
        self.history: list[int] = []

    def accept(self, token: int) -> bool:
        self.history.append(token)
        self.pos += 1
        return self.grammar is not None and self.pos < self.grammar.states

    def rollback(self, n: int) -> None:
        del self.history[len(self.history) - n:]
        self.pos -= n


class GrammarRegistry:
    """Compiled grammars by key; entries with no references may be dropped by collect()."""

    def __init__(self, compiler: Callable[[GrammarKey], int], limit: int) -> None:
        self.compiler = compiler
        self.limit = limit
        self._by_key: dict[GrammarKey, Compiled] = {}
        self._mu = threading.RLock()

    def retain(self, key: GrammarKey) -> Compiled:
        with self._mu:
            g = self._by_key.get(key)
            if g is None:
                g = Compiled(key, self.compiler(key))
                self._by_key[key] = g
            g.refs += 1
            return g

    def drop(self, g: Compiled) -> None:
        with self._mu:
            g.refs -= 1

    def collect(self) -> int:
        with self._mu:
            dead = [k for k, g in self._by_key.items() if g.refs == 0]
            for k in dead[:max(0, len(self._by_key) - self.limit)]:
                del self._by_key[k]
            return len(dead)


class MatcherPool:
    def __init__(self, registry: GrammarRegistry, n: int) -> None:
        self.registry = registry
        self._idle = [Matcher() for _ in range(n)]
        self._sem = threading.Semaphore(n)

    def checkout(self, key: GrammarKey) -> Matcher:
        self._sem.acquire()  # clean: released by checkin
        m = self._idle.pop()
        m.grammar = self.registry.retain(key)  # clean: dropped by checkin
        return m

    def try_checkout(self, key: GrammarKey) -> Optional[Matcher]:
        if not self._sem.acquire(blocking=False):  # clean: near miss, False means that nothing was taken
            return None
        m = self._idle.pop()
        m.grammar = self.registry.retain(key)  # clean: dropped by checkin
        return m

    def checkin(self, m: Matcher) -> None:
        if m.grammar is not None:
            self.registry.drop(m.grammar)
        m.grammar = None
        m.pos = 0
        m.history.clear()
        self._idle.append(m)
        self._sem.release()


class MaskRows:
    """Rows of the batch's token bitmask."""

    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))

    def row(self) -> Optional[int]:
        return self._rows.pop() if self._rows else None

    def done(self, r: int) -> None:
        self._rows.append(r)


@dataclass
class Guided:
    rid: str
    matcher: Matcher
    row: int = -1
    jumped: int = 0


class GuidedDecoder:
    def __init__(self, pool: MatcherPool, rows: MaskRows) -> None:
        self.pool = pool
        self.rows = rows
        self.active: dict[str, Guided] = {}
        self.compiling: dict[str, Future] = {}
        self.executor = ThreadPoolExecutor(2)

    # ---- life of a guided request --------------------------------------------

    def begin(self, rid: str, key: GrammarKey) -> bool:
        row = self.rows.row()  # clean: in the guided record, or given back when no matcher is idle
        if row is None:
            return False
        m = self.pool.try_checkout(key)  # clean: in the guided record, end checks it in
        if m is None:
            self.rows.done(row)
            return False
        self.active[rid] = Guided(rid, m, row)
        return True

    def begin_later(self, rid: str, key: GrammarKey) -> None:
        fut = self.executor.submit(self.pool.checkout, key)  # clean: near miss, taken up by poll or shutdown
        self.compiling[rid] = fut

    def poll_compiling(self) -> list[str]:
        ready = []
        for rid, fut in list(self.compiling.items()):
            if not fut.done():
                continue
            row = self.rows.row()  # clean: in the guided record
            if row is None:
                break
            del self.compiling[rid]
            self.active[rid] = Guided(rid, fut.result(), row)
            ready.append(rid)
        return ready

    def end(self, rid: str) -> None:
        g = self.active.pop(rid, None)
        if g is None:
            return
        self.rows.done(g.row)
        self.pool.checkin(g.matcher)

    def switch(self, rid: str, key: GrammarKey) -> bool:
        """Change the grammar in mid-request, as tool calls do."""
        g = self.active[rid]
        m = self.pool.try_checkout(key)  # leak: without carried history the new matcher is not used
        if m is None:
            return False
        if not g.matcher.history:
            return False
        old, g.matcher = g.matcher, m
        self.pool.checkin(old)
        return True

    def fork(self, rid: str, child: str) -> bool:
        g = self.active[rid]
        m = self.pool.try_checkout(g.matcher.grammar.key)  # leak: not checked in when rows are out
        if m is None:
            return False
        row = self.rows.row()  # clean: in the child's record
        if row is None:
            return False
        m.history = list(g.matcher.history)
        m.pos = g.matcher.pos
        self.active[child] = Guided(child, m, row)
        return True

    # ---- one-off uses ----------------------------------------------------------

    def validate(self, key: GrammarKey, tokens: list[int]) -> bool:
        m = self.pool.checkout(key)  # leak: the first refused token returns False directly
        for t in tokens:
            if not m.accept(t):
                return False
        self.pool.checkin(m)
        return True

    def num_states(self, key: GrammarKey) -> int:
        return self.pool.registry.retain(key).states  # leak: the reference dies in the expression

    def shutdown(self) -> None:
        for rid in list(self.active):
            self.end(rid)
        for fut in self.compiling.values():
            self.pool.checkin(fut.result())
        self.compiling.clear()
        self.executor.shutdown()


class MatcherScope:
    """`with MatcherScope(pool, key) as m`"""

    def __init__(self, pool: MatcherPool, key: GrammarKey) -> None:
        self.pool = pool
        self.key = key

    def __enter__(self) -> Matcher:
        self.m = self.pool.checkout(self.key)  # clean: __exit__ checks it in
        return self.m

    def __exit__(self, kind, exc, tb) -> bool:
        self.pool.checkin(self.m)
        return False


class AuditScope(MatcherScope):
    def __enter__(self) -> Matcher:
        self.m = self.pool.checkout(self.key)  # leak: __exit__ returns early when nothing was accepted
        return self.m

    def __exit__(self, kind, exc, tb) -> bool:
        if not self.m.history:
            return False
        print("accepted", len(self.m.history), "tokens of", self.key.kind)
        return super().__exit__(kind, exc, tb)


def longest_match(pool: MatcherPool, keys: list[GrammarKey], tokens: list[int]) -> Optional[GrammarKey]:
    best, best_n = None, -1
    for key in keys:
        with MatcherScope(pool, key) as m:  # clean: the scope checks in
            n = 0
            for t in tokens:
                if not m.accept(t):
                    break
                n += 1
            if n > best_n:
                best, best_n = key, n
    return best
