"""Structured output: compiled grammars, matcher objects and bitmask rows."""
from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Optional


class Grammar:
    """Compiled form, shared by requests; destroyed when retain and release balance."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.count = 0
        self.lock = threading.Lock()

    def retain(self) -> "Grammar":
        with self.lock:
            self.count += 1
        return self

    def release(self) -> None:
        with self.lock:
            self.count -= 1


class MatcherPool:
    """Matchers are costly to build; they are rewound and reused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.built = 0
        self.idle: deque["Matcher"] = deque()

    def check_out(self, grammar: Grammar) -> Optional["Matcher"]:
        if self.idle:
            matcher = self.idle.popleft()
            matcher.rewind(grammar)
            return matcher
        if self.built >= self.limit:
            return None
        self.built += 1
        return Matcher(grammar)

    def check_in(self, matcher: "Matcher") -> None:
        self.idle.append(matcher)


class Matcher:
    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.state = 0

    def rewind(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.state = 0

    def accept(self, token: int) -> bool:
        self.state += 1
        return token % 7 != 0


class MaskRows:
    def __init__(self, rows: int) -> None:
        self.open_rows = set(range(rows))

    def get_row(self) -> int:
        return self.open_rows.pop()

    def put_row(self, row: int) -> None:
        self.open_rows.add(row)


@dataclass
class StructuredRequest:
    rid: str
    source: str
    grammar: Optional[Grammar] = None
    matcher: Optional[Matcher] = None
    row: Optional[int] = None


class Backend(ABC):
    """Life of a structured request: `start`, any number of `advance`, `stop`."""

    def __init__(self, pool: MatcherPool, rows: MaskRows, executor: Executor) -> None:
        self.pool = pool
        self.rows = rows
        self.executor = executor
        self.grammars: dict[str, Grammar] = {}
        self.compiling: dict[str, "Future[Grammar]"] = {}

    def get_grammar(self, source: str) -> Grammar:
        grammar = self.grammars.setdefault(source, Grammar(source))
        return grammar.retain()  # clean: handed to the caller

    @abstractmethod
    def start(self, req: StructuredRequest) -> bool: ...

    @abstractmethod
    def stop(self, req: StructuredRequest) -> None: ...

    def advance(self, req: StructuredRequest, token: int) -> bool:
        return req.matcher is not None and req.matcher.accept(token)

    def vocabulary_overlap(self, left: str, right: str) -> float:
        a = self.get_grammar(left)  # clean: released at the end
        b = self.get_grammar(right)  # leak: only the left one is released
        common = set(a.source) & set(b.source)
        union = set(a.source) | set(b.source)
        a.release()
        return len(common) / max(len(union), 1)

    def validate(self, source: str, sample: list[int]) -> bool:
        grammar = self.get_grammar(source)  # clean: released on both ways out
        matcher = self.pool.check_out(grammar)  # leak: a token refused returns without check_in
        if matcher is None:
            grammar.release()
            return True
        for token in sample:
            if not matcher.accept(token):
                grammar.release()
                return False
        self.pool.check_in(matcher)
        grammar.release()
        return True


class EagerBackend(Backend):
    def start(self, req: StructuredRequest) -> bool:
        grammar = self.get_grammar(req.source)  # clean: released on refusal or by stop()
        matcher = self.pool.check_out(grammar)  # clean: in the request, stop() checks it in
        if matcher is None:
            grammar.release()
            return False
        req.grammar, req.matcher = grammar, matcher
        req.row = self.rows.get_row()  # clean: near miss, stop() puts it back
        return True

    def stop(self, req: StructuredRequest) -> None:
        if req.row is not None:
            self.rows.put_row(req.row)
            req.row = None
        if req.matcher is not None:
            self.pool.check_in(req.matcher)
            req.matcher = None
        if req.grammar is not None:
            req.grammar.release()
            req.grammar = None

    def validate_all(self, sources: list[str], sample: list[int]) -> list[str]:
        good: list[str] = []
        for source in sources:
            grammar = self.get_grammar(source)  # clean: released in finally whatever way the pass ends
            try:
                if not source:
                    continue
                if all(t % 7 for t in sample) and grammar.count > 0:
                    good.append(source)
            finally:
                grammar.release()
        return good


class DeferredBackend(Backend):
    """Compiles in the executor; the request starts once compilation is done."""

    def submit(self, req: StructuredRequest) -> None:
        if req.rid not in self.compiling:
            self.compiling[req.rid] = self.executor.submit(self.get_grammar, req.source)

    def cancel(self, req: StructuredRequest) -> None:
        future = self.compiling.pop(req.rid, None)
        if future is not None and not future.cancel():
            future.result().release()

    def start(self, req: StructuredRequest) -> bool:
        future = self.compiling.get(req.rid)
        if future is None or not future.done():
            return False
        del self.compiling[req.rid]
        req.grammar = future.result()
        req.matcher = self.pool.check_out(req.grammar)  # leak: this class's stop() releases only the grammar
        return req.matcher is not None

    def stop(self, req: StructuredRequest) -> None:
        self.cancel(req)
        if req.grammar is not None:
            req.grammar.release()
            req.grammar = None
        req.matcher = None

    def mask_batch(self, reqs: list[StructuredRequest], words: int) -> dict[str, list[int]]:
        """One row per request for this step only."""
        taken: dict[str, int] = {}
        masks: dict[str, list[int]] = {}
        for req in reqs:
            if req.matcher is None:
                continue
            row = self.rows.get_row()  # clean: near miss, popped and put back in the loop below
            taken[req.rid] = row
            masks[req.rid] = [row] * words
        while taken:
            _, row = taken.popitem()
            self.rows.put_row(row)
        return masks

    def mask_pairs(self, reqs: list[StructuredRequest]) -> dict[str, tuple[int, int]]:
        taken: dict[str, tuple[int, int]] = {}
        for req in reqs:
            low = self.rows.get_row()  # clean: put back below as first of the pair
            high = self.rows.get_row()  # leak: the loop below puts back only the first of each pair
            taken[req.rid] = (low, high)
        out = dict(taken)
        for low, _ in taken.values():
            self.rows.put_row(low)
        return out
