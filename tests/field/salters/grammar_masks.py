"""Structured output: grammar compilation, matcher states and the token bitmask table."""
from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch


class BitmaskTable:
    """One row of int32 words per constrained request."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.words = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32)
        self._unused = set(range(rows))

    def row_new(self) -> int:
        """-1 when the table is full."""
        return self._unused.pop() if self._unused else -1

    def row_del(self, row: int) -> None:
        self.words[row].fill_(-1)
        self._unused.add(row)


class CompiledGrammar:
    """Reference counted; the last decref() lets the automaton go."""

    def __init__(self, source: str, store: "GrammarStore") -> None:
        self.source = source
        self.store = store
        self.refs = 1

    def incref(self) -> "CompiledGrammar":
        self.refs += 1
        return self

    def decref(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.store.forget(self.source)


class GrammarStore:
    def __init__(self, compile_slots: int) -> None:
        self._live: Dict[str, CompiledGrammar] = {}
        self._compile = threading.BoundedSemaphore(compile_slots)
        self._mutex = threading.Lock()

    def forget(self, source: str) -> None:
        self._live.pop(source, None)

    def get_ref(self, source: str) -> Optional[CompiledGrammar]:
        """A reference for the caller; None when the grammar cannot be compiled now."""
        self._mutex.acquire()  # clean: released in the finally
        try:
            live = self._live.get(source)
            if live is not None:
                return live.incref()  # clean: the caller's reference
        finally:
            self._mutex.release()
        if not self._compile.acquire(timeout=1.0):  # clean: released after the compilation
            return None
        grammar = CompiledGrammar(source, self)
        self._compile.release()
        with self._mutex:
            self._live[source] = grammar
        return grammar

    def validate(self, source: str) -> bool:
        if not self._compile.acquire(timeout=1.0):  # leak: an empty source returns without the release
            return False
        if not source.strip():
            return False
        ok = source.count("(") == source.count(")")
        self._compile.release()
        return ok


@dataclass
class Constraint:
    grammar: CompiledGrammar
    row: int
    position: int = 0
    terminated: bool = False


class GuidedBackend:
    def __init__(self, store: GrammarStore, table: BitmaskTable, workers: int = 2) -> None:
        self.store = store
        self.table = table
        self._pool = ThreadPoolExecutor(workers)
        self._constraints: Dict[str, Constraint] = {}
        self._pending: Dict[str, "Future[Optional[CompiledGrammar]]"] = {}
        self.full = 0

    def add(self, rid: str, source: str) -> bool:
        grammar = self.store.get_ref(source)  # leak: the reference is kept when the table is full
        if grammar is None:
            return False
        row = self.table.row_new()  # clean: in the constraint, see remove()
        if row < 0:
            self.full += 1
            return False
        self._constraints[rid] = Constraint(grammar, row)
        return True

    def add_strict(self, rid: str, source: str) -> bool:
        row = self.table.row_new()  # clean: near miss, deleted when the grammar is refused
        if row < 0:
            self.full += 1
            return False
        grammar = self.store.get_ref(source)  # clean: in the constraint
        if grammar is None:
            self.table.row_del(row)
            return False
        self._constraints[rid] = Constraint(grammar, row)
        return True

    def remove(self, rid: str) -> None:
        con = self._constraints.pop(rid, None)
        if con is None:
            return
        con.grammar.decref()
        self.table.row_del(con.row)

    def fork(self, parent: str, child: str) -> bool:
        con = self._constraints[parent]
        row = self.table.row_new()  # clean: the child's row
        if row == -1:
            return False
        twin = Constraint(con.grammar.incref(), row, con.position)  # clean: remove(child) drops the reference
        self._constraints[child] = twin
        return True

    def retire_terminated(self) -> int:
        live = {rid: con for rid, con in self._constraints.items() if not con.terminated}
        gone = [con for con in self._constraints.values() if con.terminated]
        for con in gone:
            con.grammar.decref()
            self.table.row_del(con.row)
        self._constraints = live
        return len(gone)

    # -- compilation ahead of admission ----------------------------------------------------------

    def submit(self, rid: str, source: str) -> None:
        if rid not in self._pending:
            fut = self._pool.submit(self.store.get_ref, source)  # clean: near miss, see poll(), cancel()
            self._pending[rid] = fut

    def poll(self, rid: str) -> bool:
        fut = self._pending.get(rid)
        if fut is None or not fut.done():
            return False
        del self._pending[rid]
        grammar = fut.result()
        if grammar is None:
            return False
        row = self.table.row_new()  # clean: stored, or -1
        if row < 0:
            grammar.decref()
            return False
        self._constraints[rid] = Constraint(grammar, row)
        return True

    def cancel(self, rid: str) -> None:
        fut = self._pending.pop(rid, None)
        if fut is not None:
            fut.add_done_callback(self._discard)

    @staticmethod
    def _discard(fut: "Future[Optional[CompiledGrammar]]") -> None:
        grammar = fut.result()
        if grammar is not None:
            grammar.decref()

    # -- masks -----------------------------------------------------------------------------------

    def draft_masks(self, rid: str, drafts: List[int]) -> Optional[torch.Tensor]:
        con = self._constraints[rid]
        rows: List[int] = []
        for token in drafts:
            row = self.table.row_new()  # leak: the rows before a full table are not deleted
            if row < 0:
                return None
            self.table.words[row] = self.table.words[con.row] ^ token
            rows.append(row)
        masks = self.table.words[rows].clone()
        for row in rows:
            self.table.row_del(row)
        return masks

    def peek_mask(self, source: str) -> Optional[torch.Tensor]:
        grammar = self.store.get_ref(source)  # clean: decref'ed on both ways
        if grammar is None:
            return None
        row = self.table.row_new()  # leak: the clone is returned, the row is not deleted
        if row < 0:
            grammar.decref()
            return None
        mask = self.table.words[row].clone()
        grammar.decref()
        return mask

    def compare(self, left: str, right: str) -> bool:
        a = self.store.get_ref(left)  # leak: returns False without decref when the right one is refused
        b = self.store.get_ref(right)  # clean: decref'ed whenever it is there
        if a is None or b is None:
            if b is not None:
                b.decref()
            return False
        same = a.source.split() == b.source.split()
        a.decref()
        b.decref()
        return same

    def preheat(self, sources: List[str]) -> int:
        warm: Dict[str, CompiledGrammar] = {}
        for source in sources:
            ref = self.store.get_ref(source)  # clean: near miss, a repeat drops the earlier one
            if ref is None:
                continue
            if source in warm:
                warm[source].decref()
            warm[source] = ref
        for ref in warm.values():
            ref.decref()
        return len(warm)

    def common_prefix(self, rid: str, sources: List[str]) -> str:
        con = self._constraints[rid]
        best = ""
        for source in sources:
            ref = self.store.get_ref(source)  # leak: an exact match breaks out of the loop with its reference
            if ref is None:
                continue
            if ref.source == con.grammar.source:
                best = source
                break
            if len(ref.source) > len(best):
                best = ref.source
            ref.decref()
        return best
