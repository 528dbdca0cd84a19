"""Constrained decoding: compiled grammars, pooled matchers and a shared bitmask."""
import concurrent.futures as cf
import threading
from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Tuple


class BitmaskRows:
    def __init__(self, n: int):
        self._free = set(range(n))

    def claim(self) -> int:
        return self._free.pop() if self._free else -1

    def unclaim(self, row: int) -> None:
        self._free.add(row)


class Matcher:
    def __init__(self, grammar: Any):
        self.grammar = grammar
        self.pos = 0

    def reset(self) -> None:
        self.pos = 0

    def accept(self, token: int) -> bool:
        ok = self.grammar.allows(self.pos, token)
        self.pos += ok
        return ok


class GrammarStore:
    """Compiled grammars are counted; those with count zero may be evicted."""

    def __init__(self, compile_fn: Callable[[str], Any], capacity: int = 256):
        self._compile = compile_fn
        self._capacity = capacity
        self._items: Dict[str, Any] = {}
        self._users: Counter = Counter()
        self._lock = threading.Lock()

    def retain(self, key: str) -> Optional[Any]:
        with self._lock:
            g = self._items.get(key)
            if g is not None:
                self._users[key] += 1
            return g

    def drop(self, key: str) -> None:
        with self._lock:
            self._users[key] -= 1

    def compile(self, key: str) -> None:
        g = self._compile(key)
        with self._lock:
            if len(self._items) >= self._capacity:
                for k in [k for k in self._items if not self._users[k]][:1]:
                    del self._items[k]
            self._items[key] = g


class GrammarRequest:
    def __init__(self, rid: str, key: str):
        self.rid = rid
        self.key = key
        self.matcher: Optional[Matcher] = None
        self.row = -1
        self.future: Optional[cf.Future] = None


class GrammarBackend:
    def __init__(self, store: GrammarStore, rows: BitmaskRows, workers: int = 4):
        self.store = store
        self.rows = rows
        self._exec = cf.ThreadPoolExecutor(workers)
        self.pending: List[GrammarRequest] = []
        self.active: Dict[str, GrammarRequest] = {}
        self.jump_rows: Dict[str, int] = {}

    def submit(self, req: GrammarRequest) -> bool:
        g = self.store.retain(req.key)  # leak: without a mask row the request is refused and the grammar kept counted
        if g is None:
            req.future = self._exec.submit(self.store.compile, req.key)
            self.pending.append(req)
            return False
        req.row = self.rows.claim()  # clean: the request's until finish
        if req.row < 0:
            return False
        req.matcher = Matcher(g)
        self.active[req.rid] = req
        return True

    def poll(self) -> List[GrammarRequest]:
        ready, waiting = [], []
        for req in self.pending:
            if not req.future.done():
                waiting.append(req)
                continue
            if req.future.exception() is not None:
                continue
            g = self.store.retain(req.key)  # clean: near miss, dropped when there is no row, else finish drops it
            if g is None:
                req.future = self._exec.submit(self.store.compile, req.key)
                waiting.append(req)
                continue
            row = self.rows.claim()  # clean: near miss, below zero nothing was claimed
            if row < 0:
                self.store.drop(req.key)
                waiting.append(req)
                continue
            req.matcher, req.row = Matcher(g), row
            self.active[req.rid] = req
            ready.append(req)
        self.pending = waiting
        return ready

    def finish(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        self.rows.unclaim(req.row)
        self.store.drop(req.key)
        req.matcher, req.row = None, -1

    def swap_grammar(self, rid: str, key: str) -> bool:
        req = self.active[rid]
        g = self.store.retain(key)  # leak: the key is replaced, the grammar under the old key is not dropped
        if g is None:
            return False
        req.key, req.matcher = key, Matcher(g)
        return True

    def fork(self, rid: str, child: str) -> Optional[GrammarRequest]:
        parent = self.active[rid]
        row = self.rows.claim()  # clean: near miss, unclaimed when the grammar is gone, else the child's
        if row < 0:
            return None
        g = self.store.retain(parent.key)  # clean: the child's, finish drops it
        if g is None:
            self.rows.unclaim(row)
            return None
        req = GrammarRequest(child, parent.key)
        req.matcher, req.row = Matcher(g), row
        self.active[child] = req
        return req

    def validate(self, key: str, tokens: List[int]) -> Tuple[bool, int]:
        g = self.store.retain(key)  # leak: the first refused token returns with the grammar counted
        if g is None:
            return False, 0
        m = Matcher(g)
        for i, t in enumerate(tokens):
            if not m.accept(t):
                return False, i
        self.store.drop(key)
        return True, len(tokens)

    def dry_run(self, key: str, tokens: List[int]) -> bool:
        g = self.store.retain(key)  # clean: near miss, the break falls through to the drop
        if g is None:
            return False
        m, ok = Matcher(g), True
        for t in tokens:
            if not m.accept(t):
                ok = False
                break
        self.store.drop(key)
        return ok

    def begin_jump(self, rid: str) -> bool:
        if rid not in self.active:
            return False
        row = self.rows.claim()  # leak: a second jump before end_jump overwrites the first one's row
        if row < 0:
            return False
        self.jump_rows[rid] = row
        return True

    def end_jump(self, rid: str) -> None:
        row = self.jump_rows.pop(rid, -1)
        if row >= 0:
            self.rows.unclaim(row)
