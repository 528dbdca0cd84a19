"""Guided decoding backend: compiled grammars with users, matcher pool and rows of a shared bitmask."""
from __future__ import annotations

import concurrent.futures as cf
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Grammar:
    def __init__(self, source: str) -> None:
        self.source = source
        self.users = 0

    def accepts(self, history: list[int], token: int) -> bool:
        return (hash(self.source) + sum(history) + token) % 7 != 0


class GrammarCache:
    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._items: dict[str, Grammar] = {}

    def retain(self, source: str) -> Grammar:
        if source not in self._items:
            if len(self._items) >= self.cap:
                for key in [k for k, g in self._items.items() if g.users == 0]:
                    del self._items[key]
            self._items[source] = Grammar(source)
        g = self._items[source]
        g.users += 1
        return g

    def relinquish(self, g: Grammar) -> None:
        g.users -= 1


class Pool(Generic[T]):
    def __init__(self, items: list[T]) -> None:
        self._items: deque[T] = deque(items)

    def __len__(self) -> int:
        return len(self._items)

    def pull(self) -> T | None:
        return self._items.popleft() if self._items else None

    def push(self, item: T) -> None:
        self._items.append(item)


@dataclass
class Matcher:
    grammar: Grammar | None = None
    history: list[int] = field(default_factory=list)

    def reset(self, grammar: Grammar | None) -> None:
        self.grammar = grammar
        self.history.clear()


@dataclass
class GuidedReq:
    rid: str
    schema: str
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    row: int | None = None
    future: "cf.Future[Grammar] | None" = None


class GuidedBackend:
    def __init__(self, cache: GrammarCache, matchers: Pool[Matcher], rows: int, vocab: int) -> None:
        self.cache = cache
        self.matchers = matchers
        self.mask = torch.zeros(rows, vocab, dtype=torch.bool)
        self.rows: Pool[int] = Pool(list(range(rows)))
        self.executor = cf.ThreadPoolExecutor(2)
        self.compiling: dict[str, GuidedReq] = {}
        self.ready: deque[GuidedReq] = deque()

    def submit(self, req: GuidedReq) -> None:
        req.future = self.executor.submit(self.cache.retain, req.schema)  # leak: cancel_compile drops the request although the grammar is retained when the future is done
        self.compiling[req.rid] = req

    def poll(self) -> None:
        for rid, req in list(self.compiling.items()):
            if req.future is None or not req.future.done():
                continue
            del self.compiling[rid]
            req.grammar = req.future.result()
            self.ready.append(req)

    def cancel_compile(self, rid: str) -> bool:
        req = self.compiling.pop(rid, None)
        if req is None or req.future is None:
            return False
        return req.future.cancel()

    def begin(self, req: GuidedReq) -> bool:
        matcher = self.matchers.pull()  # leak: a mask without a free row returns False and drops the matcher
        if matcher is None:
            return False
        row = self.rows.pull()  # clean: near miss, row 0 is told apart from None and end pushes it back
        if row is None:
            return False
        matcher.reset(req.grammar)
        req.matcher, req.row = matcher, row
        return True

    def fork(self, req: GuidedReq, rid: str) -> GuidedReq | None:
        if req.matcher is None or req.row is None:
            return None
        matcher = self.matchers.pull()  # clean: near miss, pushed back when the row is missing
        if matcher is None:
            return None
        row = self.rows.pull()  # clean: near miss, the child carries it to end
        if row is None:
            self.matchers.push(matcher)
            return None
        child = GuidedReq(rid, req.schema)
        child.grammar = self.cache.retain(req.schema)  # clean: relinquished by end of the child
        matcher.reset(child.grammar)
        matcher.history.extend(req.matcher.history)
        child.matcher, child.row = matcher, row
        return child

    def jump(self, req: GuidedReq, tokens: list[int]) -> int:
        """Counts how many forced tokens a scratch matcher accepts."""
        scratch = self.matchers.pull()  # clean: near miss, a rejected token only breaks, the push follows the loop
        if scratch is None:
            return 0
        scratch.reset(req.grammar)
        n = 0
        for t in tokens:
            if scratch.grammar is not None and not scratch.grammar.accepts(scratch.history, t):
                break
            scratch.history.append(t)
            n += 1
        scratch.reset(None)
        self.matchers.push(scratch)
        return n

    def validate(self, schema: str, tokens: list[int]) -> bool:
        g = self.cache.retain(schema)  # leak: the first rejected token returns before the relinquish
        history: list[int] = []
        for t in tokens:
            if not g.accepts(history, t):
                return False
            history.append(t)
        self.cache.relinquish(g)
        return True

    def validate_all(self, schemas: list[str]) -> list[bool]:
        out: list[bool] = []
        for s in schemas:
            g = self.cache.retain(s)  # clean: near miss, relinquished before the verdict is looked at
            ok = g.accepts([], 0)
            self.cache.relinquish(g)
            if not ok:
                out.append(False)
                continue
            out.append(True)
        return out

    def swap_schema(self, req: GuidedReq, schema: str) -> None:
        g = self.cache.retain(schema)  # leak: the grammar which the request held before is overwritten
        req.schema = schema
        req.grammar = g
        if req.matcher is not None:
            req.matcher.reset(g)

    def fill(self, reqs: list[GuidedReq]) -> torch.Tensor:
        for req in reqs:
            if req.row is not None:
                self.mask[req.row].fill_(True)
        return self.mask

    def spare_row(self, req: GuidedReq) -> int:
        row = self.rows.pull()  # leak: zero is a valid row and the truth test takes it for none
        if not row:
            return -1
        self.mask[row].zero_()
        self.rows.push(row)
        return row

    def end(self, req: GuidedReq) -> None:
        if req.matcher is not None:
            req.matcher.reset(None)
            self.matchers.push(req.matcher)
            req.matcher = None
        if req.row is not None:
            self.rows.push(req.row)
            req.row = None
        if req.grammar is not None:
            self.cache.relinquish(req.grammar)
            req.grammar = None


def run(backend: GuidedBackend, reqs: list[GuidedReq]) -> int:
    for r in reqs:
        backend.submit(r)
    finished = 0
    while backend.compiling or backend.ready:
        backend.poll()
        if not backend.ready:
            continue
        r = backend.ready.popleft()
        if not backend.begin(r):
            backend.end(r)
            continue
        child = backend.fork(r, f"{r.rid}/0")  # clean: near miss, both ended and None is skipped
        backend.fill([r] if child is None else [r, child])
        backend.jump(r, [1, 2, 3])
        if child is not None:
            backend.end(child)
        backend.end(r)
        finished += 1
    return finished
