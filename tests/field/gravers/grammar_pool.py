"""Structured output: compiled grammars give matchers, and rows of a token bitmask are allotted."""
from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable


@dataclass
class Matcher:
    grammar: str
    position: int = 0
    terminated: bool = False

    def accept(self, token: int) -> bool:
        self.position += 1
        self.terminated = token == 0
        return token >= 0

    def reset(self) -> None:
        self.position = 0
        self.terminated = False


class MatcherPool:
    def __init__(self, per_grammar: int):
        self.per_grammar = per_grammar
        self._spare: dict[str, list[Matcher]] = {}
        self._lent: dict[str, int] = {}
        self._guard = threading.RLock()

    def fetch(self, grammar: str) -> Matcher | None:
        with self._guard:
            spare = self._spare.setdefault(grammar, [])
            if self._lent.get(grammar, 0) >= self.per_grammar:
                return None
            self._lent[grammar] = self._lent.get(grammar, 0) + 1
            return spare.pop() if spare else Matcher(grammar)

    def recycle(self, matcher: Matcher) -> None:
        matcher.reset()
        with self._guard:
            self._lent[matcher.grammar] -= 1
            self._spare[matcher.grammar].append(matcher)


class MaskRows:
    """Rows of the bitmask tensor. -1 says that none is left."""

    def __init__(self, rows: int):
        self._open = set(range(rows))

    def assign(self) -> int:
        return self._open.pop() if self._open else -1

    def unassign(self, row: int) -> None:
        self._open.add(row)


matchers = MatcherPool(per_grammar=8)


def validate_json(schema: str, tokens: list[int]) -> bool:
    """Replays tokens through a throwaway matcher."""
    matcher = matchers.fetch(schema)  # leak: the first refused token returns with the matcher lent
    if matcher is None:
        return False
    for token in tokens:
        if not matcher.accept(token):
            return False
    ended = matcher.terminated
    matchers.recycle(matcher)
    return ended


def validate_prefix(schema: str, tokens: list[int]) -> int:
    matcher = matchers.fetch(schema)  # clean: the break still comes to recycle
    if matcher is None:
        return 0
    good = 0
    for token in tokens:
        if not matcher.accept(token):
            break
        good += 1
    matchers.recycle(matcher)
    return good


def matcher_for(spec: dict[str, Any]) -> Matcher | None:
    kind = spec.get("type", "json")
    source = json.dumps(spec["schema"], sort_keys=True) if kind == "json" else spec["pattern"]
    return matchers.fetch(f"{kind}:{source}")  # clean: handed to the caller


def with_matcher(spec: dict[str, Any], fn: Callable[[Matcher], int]) -> int:
    matcher = matcher_for(spec)  # clean: recycled in finally after the callback
    if matcher is None:
        return -1
    try:
        return fn(matcher)
    finally:
        matchers.recycle(matcher)


@dataclass
class GuidedRequest:
    rid: str
    spec: dict[str, Any]
    jump_forward: bool = False
    matcher: Matcher | None = None
    row: int = -1


class GuidedDecoder:
    def __init__(self, rows: MaskRows, workers: int = 2):
        self.rows = rows
        self.executor = ThreadPoolExecutor(workers)
        self.compiling: dict[str, Future] = {}
        self.active: dict[str, GuidedRequest] = {}
        self.rollback_rows: list[int] = []

    def start(self, req: GuidedRequest) -> bool:
        if req.rid in self.active or req.rid in self.compiling:
            return False
        req.matcher = matcher_for(req.spec)  # clean: near miss, _clear recycles it here or in stop
        req.row = self.rows.assign()  # clean: near miss, _clear unassigns it here or in stop
        if req.matcher is None or req.row < 0:
            self._clear(req)
            return False
        self.active[req.rid] = req
        return True

    def _clear(self, req: GuidedRequest) -> None:
        if req.matcher is not None:
            matchers.recycle(req.matcher)
            req.matcher = None
        if req.row >= 0:
            self.rows.unassign(req.row)
            req.row = -1

    @staticmethod
    def _recycle_result(future: Future) -> None:
        matcher = future.result()
        if matcher is not None:
            matchers.recycle(matcher)

    def stop(self, rid: str) -> None:
        future = self.compiling.pop(rid, None)
        if future is not None:
            future.add_done_callback(self._recycle_result)
        req = self.active.pop(rid, None)
        if req is not None:
            self._clear(req)

    def compile_async(self, req: GuidedRequest) -> None:
        if req.rid in self.compiling or req.rid in self.active:
            return
        future = self.executor.submit(matcher_for, req.spec)  # clean: near miss, polled or recycled by stop
        self.compiling[req.rid] = future

    def poll_compiled(self, req: GuidedRequest) -> bool:
        future = self.compiling.get(req.rid)
        if future is None or not future.done():
            return False
        req.matcher = self.compiling.pop(req.rid).result()
        if req.matcher is None:
            return False
        self.active[req.rid] = req
        return True

    def jump(self, req: GuidedRequest, tokens: list[int]) -> int:
        row = self.rows.assign() if req.jump_forward else -1  # leak: the early zero comes before unassign
        if req.matcher is None or not tokens:
            return 0
        accepted = sum(1 for t in tokens if req.matcher.accept(t))
        if req.jump_forward and row >= 0:
            self.rows.unassign(row)
        return accepted

    def jump_masked(self, req: GuidedRequest, tokens: list[int]) -> int:
        row = self.rows.assign() if req.jump_forward else -1  # clean: near miss, the flag guards unassign too
        accepted = 0
        if req.matcher is not None:
            accepted = sum(1 for t in tokens if req.matcher.accept(t))
        if req.jump_forward and row >= 0:
            self.rows.unassign(row)
        return accepted

    def speculative_rows(self, count: int) -> bool:
        for _ in range(count):
            row = self.rows.assign()  # clean: kept in rollback_rows, commit_rows unassigns them
            if row < 0:
                self.commit_rows()
                return False
            self.rollback_rows.append(row)
        return True

    def commit_rows(self) -> None:
        while self.rollback_rows:
            self.rows.unassign(self.rollback_rows.pop())

    def restart(self, req: GuidedRequest, spec: dict[str, Any]) -> bool:
        if req.rid not in self.active:
            return False
        fresh = matcher_for(spec)  # clean: near miss, takes the place of the recycled one
        if fresh is None:
            return False
        if req.matcher is not None:
            matchers.recycle(req.matcher)
        req.matcher, req.spec = fresh, spec
        return True

    def dry_start(self, req: GuidedRequest) -> bool:
        matcher = matcher_for(req.spec)  # clean: recycled when there is one
        row = self.rows.assign()  # leak: only the matcher is given back
        ready = matcher is not None and row >= 0
        if matcher is not None:
            matchers.recycle(matcher)
        return ready

    def benchmark(self, spec: dict[str, Any], tokens: list[int]) -> tuple[int, bool]:
        probe = matcher_for(spec)  # leak: a second matcher for the tail is bound to the same name
        count = sum(1 for t in tokens if probe is not None and probe.accept(t))
        probe = matcher_for(spec)  # clean: recycled below
        if probe is None:
            return count, False
        ended = probe.accept(tokens[-1]) if tokens else False
        matchers.recycle(probe)
        return count, ended
