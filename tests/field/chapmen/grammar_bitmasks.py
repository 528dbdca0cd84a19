"""Structured output: compiled grammars, matchers and bitmask rows."""
from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Tuple


class Grammar:
    def __init__(self, key: str, rules: List[str]) -> None:
        self.key = key
        self.rules = rules
        self.users = 0


class GrammarStore:
    """Compiled grammars with a use count; unused ones may be purged."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._store: Dict[str, Grammar] = {}
        self._mu = threading.RLock()

    def retain(self, key: str) -> Optional[Grammar]:
        with self._mu:
            grammar = self._store.get(key)
            if grammar is None:
                return None
            grammar.users += 1
            return grammar

    def drop(self, grammar: Grammar) -> None:
        with self._mu:
            grammar.users -= 1

    def add(self, key: str, rules: List[str]) -> Grammar:
        """Insert (or find) a grammar; it comes back retained."""
        with self._mu:
            grammar = self._store.get(key)
            if grammar is None:
                self._purge()
                grammar = self._store[key] = Grammar(key, rules)
            grammar.users += 1
            return grammar

    def _purge(self) -> None:
        for key in [k for k, g in self._store.items() if g.users == 0]:
            if len(self._store) < self.capacity:
                break
            del self._store[key]

    def retain_or_add(self, key: str, rules: List[str]) -> Grammar:
        grammar = self.retain(key)  # clean: handed on, or None
        if grammar is None:
            grammar = self.add(key, rules)  # clean: handed on
        return grammar


class BitmaskTable:
    def __init__(self, rows: int, words: int) -> None:
        self.rows = [[0] * words for _ in range(rows)]
        self._unused = set(range(rows))

    def open_row(self) -> Optional[int]:
        return self._unused.pop() if self._unused else None

    def close_row(self, row: int) -> None:
        self.rows[row] = [0] * len(self.rows[row])
        self._unused.add(row)


class Matcher:
    """One request's position in a grammar. Owns its grammar use and row."""

    def __init__(self, grammar: Grammar, row: int, store: GrammarStore, table: BitmaskTable) -> None:
        self.grammar = grammar
        self.row = row
        self._store = store
        self._table = table
        self.state = 0

    def accept(self, token: int) -> bool:
        self.state += 1
        return token % len(self.grammar.rules) == 0

    def close(self) -> None:
        self._table.close_row(self.row)
        self._store.drop(self.grammar)


class JumpMatcher(Matcher):
    """Also follows forced tokens, for which it has a row of its own."""

    def __init__(self, grammar: Grammar, row: int, store: GrammarStore, table: BitmaskTable) -> None:
        super().__init__(grammar, row, store, table)
        self.jump_row = table.open_row()  # leak: close() is inherited and only closes the first row

    def forced(self) -> List[int]:
        if self.jump_row is None:
            return []
        return [i for i, bit in enumerate(self._table.rows[self.jump_row]) if bit]


class DualMatcher(Matcher):
    """Has a second grammar for the reasoning part of the answer."""

    def __init__(
        self, grammar: Grammar, think: Grammar, row: int, store: GrammarStore, table: BitmaskTable
    ) -> None:
        super().__init__(grammar, row, store, table)
        self.think = store.retain(think.key)  # clean: near miss, close() is overridden and drops it too

    def close(self) -> None:
        if self.think is not None:
            self._store.drop(self.think)
            self.think = None
        super().close()


class GrammarBackend:
    def __init__(self, store: GrammarStore, table: BitmaskTable, workers: int = 2) -> None:
        self.store = store
        self.table = table
        self.pool = ThreadPoolExecutor(workers)
        self.matchers: Dict[str, Matcher] = {}
        self.compiling: Dict[str, "Future[Grammar]"] = {}

    def open_matcher(self, rid: str, key: str, rules: List[str]) -> bool:
        if rid in self.matchers:
            return True
        grammar = self.store.retain_or_add(key, rules)  # clean: owned by the matcher, dropped without a row
        row = self.table.open_row()  # clean: owned by the matcher
        if row is None:
            self.store.drop(grammar)
            return False
        self.matchers[rid] = Matcher(grammar, row, self.store, self.table)
        return True

    def open_dual(self, rid: str, key: str, think_key: str) -> bool:
        if rid in self.matchers:
            return True
        grammar = self.store.retain(key)  # leak: stays in use when the think grammar is unknown
        if grammar is None:
            return False
        think = self.store.retain(think_key)  # clean: near miss, the matcher retains for itself, dropped here
        if think is None:
            return False
        row = self.table.open_row()  # clean: owned by the matcher
        if row is None:
            self.store.drop(think)
            self.store.drop(grammar)
            return False
        dual = DualMatcher(grammar, think, row, self.store, self.table)  # clean: kept, close_matcher() closes
        self.matchers[rid] = dual
        self.store.drop(think)
        return True

    def close_matcher(self, rid: str) -> None:
        matcher = self.matchers.pop(rid, None)
        if matcher is not None:
            matcher.close()

    def compile_async(self, key: str, rules: List[str]) -> None:
        if key not in self.compiling:
            future = self.pool.submit(self.store.add, key, rules)  # clean: near miss, collect() drops it
            self.compiling[key] = future

    def collect(self) -> List[str]:
        done = [k for k, f in self.compiling.items() if f.done()]
        for key in done:
            self.store.drop(self.compiling.pop(key).result())
        return done

    def rule_count(self, key: str, rules: List[str]) -> int:
        return len(self.store.retain_or_add(key, rules).rules)  # leak: a use taken only to count rules

    def known(self, key: str) -> bool:
        return self.store.retain(key) is not None  # leak: retain() as a membership test leaves a use behind

    def describe(self, key: str) -> Dict[str, Any]:
        grammar = self.store.retain(key)  # clean: near miss, dropped in finally on the way out
        if grammar is None:
            return {"key": key, "known": False}
        try:
            return {"key": key, "known": True, "rules": len(grammar.rules), "users": grammar.users - 1}
        finally:
            self.store.drop(grammar)

    def fill_masks(self, batch: List[Tuple[str, List[int]]]) -> List[int]:
        """Temporary rows for the allowed tokens of requests in a batch."""
        rows: Dict[str, int] = {}
        for rid, allowed in batch:
            row = self.table.open_row()  # clean: near miss, all rows of the dict are closed at the end
            if row is None:
                break
            if rid in rows:
                self.table.close_row(row)
                continue
            for token in allowed:
                self.table.rows[row][token // 32] |= 1 << (token % 32)
            rows[rid] = row
        words = [sum(self.table.rows[r]) for r in rows.values()]
        for row in rows.values():
            self.table.close_row(row)
        return words

    def longest_mask(self, batch: List[List[int]], width: Callable[[int], int]) -> int:
        best_row: Optional[int] = None
        best = -1
        for allowed in batch:
            row = self.table.open_row()  # leak: a better row replaces best_row, the earlier is not closed
            if row is None:
                break
            size = sum(width(t) for t in allowed)
            if size > best:
                best, best_row = size, row
            else:
                self.table.close_row(row)
        if best_row is not None:
            self.table.close_row(best_row)
        return best

    def shutdown(self) -> None:
        for rid in list(self.matchers):
            self.close_matcher(rid)
        self.pool.shutdown(wait=True)
        self.collect()
