"""Grammar-guided decoding: rented matchers, bitmask rows, per-grammar compile locks."""
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Optional

import torch

_MAX_ROWS = 256
_mask = torch.full((_MAX_ROWS, 4096), -1, dtype=torch.int32)
_spare_rows = set(range(_MAX_ROWS))


def open_row() -> Optional[int]:
    """Reserve one row of the process-wide token bitmask."""
    if not _spare_rows:
        return None
    row = _spare_rows.pop()  # clean: reset and handed to the caller
    _mask[row].fill_(-1)
    return row


def shut_row(row: int) -> None:
    _spare_rows.add(row)


class KeyedLocks:
    """One lock per grammar; the entry disappears with its last user."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._entries: dict[str, list] = {}

    def enter(self, key: str) -> None:
        with self._guard:
            entry = self._entries.setdefault(key, [threading.Lock(), 0])
            entry[1] += 1
        entry[0].acquire()  # clean: near miss, held on return by contract, leave() releases it

    def leave(self, key: str) -> None:
        with self._guard:
            entry = self._entries[key]
            entry[1] -= 1
            if entry[1] == 0:
                del self._entries[key]
        entry[0].release()


class MatcherGarage:
    def __init__(self) -> None:
        self._bays: dict[str, queue.SimpleQueue] = {}

    def stock(self, grammar: str, matchers: list) -> None:
        bay = self._bays.setdefault(grammar, queue.SimpleQueue())
        for matcher in matchers:
            bay.put(matcher)

    def rent(self, grammar: str):
        try:
            return self._bays[grammar].get_nowait()
        except (KeyError, queue.Empty):
            return None

    def rent_at_state(self, grammar: str, state: int):
        matcher = self.rent(grammar)  # leak: a matcher that cannot seek is dropped for None
        if matcher is None or not matcher.seek(state):
            return None
        return matcher

    def bring_back(self, matcher) -> None:
        matcher.reset()
        self._bays[matcher.grammar].put(matcher)


class GuidedRequest:
    def __init__(self, rid: str, grammar: str) -> None:
        self.rid = rid
        self.grammar = grammar
        self.matcher = None
        self.row: Optional[int] = None
        self.compile: Optional[Future] = None


class GrammarManager:
    def __init__(self, compiler, garage: MatcherGarage) -> None:
        self.compiler = compiler
        self.garage = garage
        self.locks = KeyedLocks()
        self.workers = ThreadPoolExecutor(4)
        self.live: dict[str, GuidedRequest] = {}

    def ensure_compiled(self, grammar: str) -> bool:
        self.locks.enter(grammar)  # leak: the syntax-error handler returns without leave
        try:
            matchers = self.compiler.build(grammar, copies=8)
        except SyntaxError:
            return False
        self.garage.stock(grammar, matchers)
        self.locks.leave(grammar)
        return True

    def recompile(self, grammar: str) -> int:
        self.locks.enter(grammar)  # clean: near miss, finally leaves on all three returns
        try:
            if not self.compiler.dirty(grammar):
                return 0
            try:
                matchers = self.compiler.build(grammar, copies=2)
            except SyntaxError:
                return -1
            self.garage.stock(grammar, matchers)
            return len(matchers)
        finally:
            self.locks.leave(grammar)

    def start(self, req: GuidedRequest) -> bool:
        matcher = self.garage.rent(req.grammar)  # clean: near miss, brought back when no row is spare
        if matcher is None:
            req.compile = self.workers.submit(self.ensure_compiled, req.grammar)
            return False
        row = open_row()  # clean: None-checked, moves to the request
        if row is None:
            self.garage.bring_back(matcher)
            return False
        req.matcher, req.row = matcher, row
        self.live[req.rid] = req
        return True

    def start_at(self, req: GuidedRequest, state: int) -> bool:
        row = open_row()  # leak: no matcher at that state returns with the row open
        if row is None:
            return False
        matcher = self.garage.rent_at_state(req.grammar, state)  # clean: moves to the request
        if matcher is None:
            return False
        req.matcher, req.row = matcher, row
        self.live[req.rid] = req
        return True

    def validate(self, grammar: str, tokens: list[int]) -> bool:
        """Would these draft tokens pass the grammar?"""
        matcher = self.garage.rent(grammar)  # leak: the first rejected token returns early
        if matcher is None:
            return False
        for token in tokens:
            if not matcher.accept(token):
                return False
        self.garage.bring_back(matcher)
        return True

    def fill_async(self, grammar: str, on_ready) -> None:
        row = open_row()  # clean: near miss, the done-callback shuts it
        if row is not None:
            job = self.workers.submit(self.compiler.fill_first, grammar, _mask[row])
            job.add_done_callback(lambda done: (on_ready(done), shut_row(row)))

    def finish(self, rid: str) -> None:
        req = self.live.pop(rid)
        self.garage.bring_back(req.matcher)
        shut_row(req.row)
