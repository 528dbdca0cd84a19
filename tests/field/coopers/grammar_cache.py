"""Structured output: shared compiled grammars, bitmask rows, matchers.

Compiled grammars are shared between requests and counted; a grammar nobody uses may be evicted.
"""
from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable

GrammarKey = tuple[str, str]


@dataclass(eq=False)
class Compiled:
    key: GrammarKey
    fsm: Any
    refs: int = 0


class GrammarStore:
    def __init__(self, compile_fn: Callable[[GrammarKey], Any], max_idle: int = 64) -> None:
        self._compile = compile_fn
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._items: dict[GrammarKey, Compiled] = {}

    def acquire(self, key: GrammarKey) -> Compiled:
        with self._lock:
            g = self._items.get(key)
            if g is None:
                g = self._items[key] = Compiled(key, self._compile(key))
            g.refs += 1
            return g

    def release(self, g: Compiled) -> None:
        with self._lock:
            g.refs -= 1
            idle = [k for k, v in self._items.items() if v.refs == 0]
            for k in idle[: max(0, len(idle) - self._max_idle)]:
                del self._items[k]


class MatcherBackend:
    """Matchers live in native memory; every open or fork needs a close."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def open(self, g: Compiled) -> int:
        return self._native.matcher_new(g.fsm)

    def fork(self, handle: int) -> int:
        return self._native.matcher_clone(handle)

    def close(self, handle: int) -> None:
        self._native.matcher_free(handle)

    def accept(self, handle: int, token: int) -> bool:
        return self._native.matcher_accept(handle, token)

    def done(self, handle: int) -> bool:
        return self._native.matcher_done(handle)

    def fill(self, handle: int, row: int) -> None:
        self._native.matcher_fill(handle, row)


class BitmaskRows:
    def __init__(self, n: int) -> None:
        self._free = set(range(n))

    def allocate(self) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        self._free.add(row)


@dataclass
class SORequest:
    request_id: str
    key: GrammarKey
    grammar: Compiled | None = None
    prefetched: Compiled | None = None
    matcher: int | None = None
    row: int | None = None
    tool_matchers: dict[str, int] = field(default_factory=dict)
    aborted: bool = False


class StructuredOutputManager:
    def __init__(self, store: GrammarStore, backend: MatcherBackend, rows: BitmaskRows) -> None:
        self.store = store
        self.backend = backend
        self.rows = rows
        self.executor = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    def start(self, req: SORequest) -> bool:
        if req.row is not None:
            return True
        g = self.store.acquire(req.key)  # clean: near miss, released when no row is left, else kept until finish
        row = self.rows.allocate()  # clean: kept in req.row, freed in finish
        if row is None:
            self.store.release(g)
            return False
        req.grammar, req.row = g, row
        req.matcher = self.backend.open(g)  # clean: closed in finish
        return True

    def start_async(self, req: SORequest) -> Future:
        fut = self.executor.submit(self.store.acquire, req.key)  # leak: for a request aborted meanwhile the callback drops the grammar

        def _ready(f: Future) -> None:
            if f.exception() is not None or req.aborted:
                return
            req.prefetched = f.result()

        fut.add_done_callback(_ready)
        return fut

    def start_tool(self, req: SORequest, tool: str) -> int:
        handle = req.tool_matchers.get(tool)
        if handle is None:
            assert req.grammar is not None
            handle = self.backend.open(req.grammar)  # leak: finish drops the tool_matchers dict without closing them
            req.tool_matchers[tool] = handle
        return handle

    def finish(self, req: SORequest) -> None:
        if req.matcher is not None:
            self.backend.close(req.matcher)
            req.matcher = None
        if req.row is not None:
            self.rows.free(req.row)
            req.row = None
        if req.grammar is not None:
            self.store.release(req.grammar)
            req.grammar = None
        if req.prefetched is not None:
            self.store.release(req.prefetched)
            req.prefetched = None
        req.tool_matchers = {}

    def restart_matcher(self, req: SORequest) -> None:
        assert req.grammar is not None
        if req.matcher is not None:
            self.backend.close(req.matcher)
        req.matcher = self.backend.open(req.grammar)  # clean: near miss, the overwritten matcher has been closed just before

    def switch_grammar(self, req: SORequest, key: GrammarKey) -> None:
        req.key = key
        if req.row is None:
            return
        req.grammar = self.store.acquire(key)  # leak: the grammar that the request held before is overwritten
        self.restart_matcher(req)

    def validate(self, key: GrammarKey) -> bool:
        kind, source = key
        g = self.store.acquire(key)  # leak: a source that is no JSON returns False before the release
        if kind == "json_schema":
            try:
                json.loads(source)
            except json.JSONDecodeError:
                return False
        ok = g.fsm is not None
        self.store.release(g)
        return ok

    def dry_run(self, key: GrammarKey, tokens: list[int]) -> int:
        g = self.store.acquire(key)  # clean: near miss, released in the finally on both returns
        try:
            handle = self.backend.open(g)  # clean: closed in the inner finally
            try:
                for i, tok in enumerate(tokens):
                    if not self.backend.accept(handle, tok):
                        return i
                return len(tokens)
            finally:
                self.backend.close(handle)
        finally:
            self.store.release(g)

    def jump_forward(self, req: SORequest, tokens: list[int]) -> bool:
        assert req.matcher is not None
        trial = self.backend.fork(req.matcher)  # clean: near miss, closed on refusal, otherwise it replaces the closed old one
        for tok in tokens:
            if not self.backend.accept(trial, tok):
                self.backend.close(trial)
                return False
        self.backend.close(req.matcher)
        req.matcher = trial
        return True
