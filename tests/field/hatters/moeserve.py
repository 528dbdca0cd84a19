"""Experts, tables, rows and draft trees of the mixture server."""
from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

try:
    import torch
except ImportError:
    torch = None


class CacheFull(Exception):
    pass


@dataclass(eq=False)
class Resident:
    expert: int
    weights: object
    borrowers: int = 0


class ExpertCache:
    """Experts on the device; several are lent at once and let go at once."""

    def __init__(self, load, capacity):
        self._load = load
        self._capacity = capacity
        self._residents = OrderedDict()
        self.evictions = 0

    def ensure_resident(self, experts):
        lent = []
        for e in experts:
            r = self._residents.get(e)
            if r is None:
                self._evict()
                r = self._residents[e] = Resident(e, self._load(e))
            r.borrowers += 1
            self._residents.move_to_end(e)
            lent.append(r)
        return lent

    def let_go(self, residents):
        for r in residents:
            r.borrowers -= 1

    def _evict(self):
        if len(self._residents) < self._capacity:
            return
        for e, r in self._residents.items():
            if not r.borrowers:
                del self._residents[e]
                self.evictions += 1
                return
        raise CacheFull


def moe_layer(cache, router, x):
    ids, gates = router(x)
    residents = cache.ensure_resident(ids)  # clean: all let go after the sum
    y = sum(g * r.weights for g, r in zip(gates, residents))
    cache.let_go(residents)
    return y


def moe_layer_topk(cache, router, x, k):
    ids, gates = router(x)
    residents = cache.ensure_resident(ids)  # leak: only the first k residents are let go
    residents = residents[:k]
    y = sum(g * r.weights for g, r in zip(gates, residents))
    cache.let_go(residents)
    return y


class TableKeeper:
    """Rotary tables by (dim, base): counted, dropped with the last reader."""

    def __init__(self, build):
        self._build = build
        self._tables = {}
        self._readers = defaultdict(int)
        self._lock = threading.Lock()

    def lend(self, dim, base=10000.0):
        key = (dim, base)
        with self._lock:
            if key not in self._tables:
                self._tables[key] = self._build(dim, base)
            self._readers[key] += 1
            return self._tables[key]

    def unlend(self, dim, base=10000.0):
        key = (dim, base)
        with self._lock:
            if self._readers[key] < 1:
                raise KeyError(key)
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key], self._tables[key]


class Rotary:
    def __init__(self, keeper, dim):
        self.keeper = keeper
        self.dim = dim
        self.table = keeper.lend(dim)  # clean: near miss, close gives the dim back by key

    def apply(self, xs):
        return [x * t for x, t in zip(xs, self.table)]

    def close(self):
        self.keeper.unlend(self.dim)
        self.table = None


class ScaledRotary:
    def __init__(self, keeper, dim):
        self.keeper = keeper
        self.dim = dim
        self.base = 10000.0
        self.table = keeper.lend(dim, self.base)  # leak: rescale changes base and table, the old key is never given back

    def rescale(self, factor):
        self.base *= factor
        self.table = self.keeper.lend(self.dim, self.base)  # leak: the next rescale loses this key likewise

    def close(self):
        self.keeper.unlend(self.dim, self.base)


class LogitRows:
    """Rows of one big matrix; lends ranges."""

    def __init__(self, nrows, vocab):
        self._matrix = torch.zeros(nrows, vocab) if torch else [[0.0] * vocab for _ in range(nrows)]
        self._owner = [None] * nrows
        self.tightest = nrows

    def seat_rows(self, owner, n):
        run = 0
        for i, who in enumerate(self._owner):
            run = run + 1 if who is None else 0
            if run == n:
                rows = range(i - n + 1, i + 1)
                for r in rows:
                    self._owner[r] = owner
                self.tightest = min(self.tightest, self._owner.count(None))
                return rows
        return range(0)

    def clear_rows(self, rows):
        for r in rows:
            self._owner[r] = None

    def __getitem__(self, r):
        return self._matrix[r]


def sample_batch(logits, name, model, prompts):
    rows = logits.seat_rows(name, len(prompts))  # clean: cleared on the refused and on the normal way
    if not rows:
        return None
    if not model.fill(logits, rows, prompts):
        logits.clear_rows(rows)
        return None
    picks = [max(logits[r]) for r in rows]
    logits.clear_rows(rows)
    return picks


def sample_retry(logits, name, model, prompts):
    for attempt in range(2):
        rows = logits.seat_rows(name, len(prompts))  # leak: a failed fill goes to the next attempt with the rows seated
        if not rows:
            return None
        if not model.fill(logits, rows, prompts):
            continue
        picks = [max(logits[r]) for r in rows]
        logits.clear_rows(rows)
        return picks
    return None


class BeamSet:
    def __init__(self, logits, name):
        self.logits = logits
        self.name = name
        self.rows = []

    def widen(self, n):
        rows = self.logits.seat_rows(self.name, n)  # clean: near miss, narrow and close clear what rows holds
        self.rows.extend(rows)
        return len(rows)

    def narrow(self, keep):
        self.logits.clear_rows(self.rows[keep:])
        del self.rows[keep:]

    def close(self):
        self.narrow(0)


class PromptLocks:
    """One lock a prompt; entries vanish when nobody wants them."""

    def __init__(self):
        self._locks = {}
        self._wanted = defaultdict(int)
        self._guard = threading.Lock()

    def latch(self, prompt_id):
        with self._guard:
            lock = self._locks.setdefault(prompt_id, threading.Lock())
            self._wanted[prompt_id] += 1
        lock.acquire()
        return prompt_id

    def unlatch(self, prompt_id):
        with self._guard:
            self._locks[prompt_id].release()
            self._wanted[prompt_id] -= 1
            if not self._wanted[prompt_id]:
                del self._wanted[prompt_id], self._locks[prompt_id]

    @contextmanager
    def latched(self, prompt_id):
        self.latch(prompt_id)
        try:
            yield
        finally:
            self.unlatch(prompt_id)


def extend_prompt(locks, store, prompt_id, tokens):
    locks.latch(prompt_id)  # leak: a full prompt returns False while latched
    have = store[prompt_id]
    if len(have) + len(tokens) > 4096:
        return False
    have.extend(tokens)
    locks.unlatch(prompt_id)
    return True


def merge_prompts(locks, store, a, b):
    with ExitStack() as stack:
        for p in sorted({a, b}):
            stack.enter_context(locks.latched(p))  # clean: the exit stack unlatches
        if b not in store:
            return False
        store[a] = store[a] + store.pop(b)
        return True


def steal_prompt(locks, store, prompt_id):
    stack = ExitStack()
    locks.latch(prompt_id)  # leak: a missing prompt returns with the stack unclosed
    stack.callback(locks.unlatch, prompt_id)
    tokens = store.pop(prompt_id, None)
    if tokens is None:
        return []
    stack.close()
    return tokens


@dataclass
class DraftNode:
    token: int
    parent: int
    children: list = field(default_factory=list)


class DraftForest:
    """Nodes of speculative trees in a flat table; pruning takes the whole subtree."""

    ROOT = -1

    def __init__(self, capacity):
        self._nodes = [None] * capacity
        self._vacant = list(range(capacity - 1, -1, -1))

    def sprout(self, parent, token):
        if not self._vacant:
            return None
        i = self._vacant.pop()
        self._nodes[i] = DraftNode(token, parent)
        if parent != self.ROOT:
            self._nodes[parent].children.append(i)
        return i

    def prune(self, i):
        stack = [i]
        parent = self._nodes[i].parent
        if parent != self.ROOT:
            self._nodes[parent].children.remove(i)
        while stack:
            k = stack.pop()
            stack.extend(self._nodes[k].children)
            self._nodes[k] = None
            self._vacant.append(k)

    def token(self, i):
        return self._nodes[i].token


def speculate(forest, draft, verify, depth):
    root = forest.sprout(forest.ROOT, draft.first())  # clean: pruned with all below it
    if root is None:
        return []
    tip = root
    for _ in range(depth):
        nxt = forest.sprout(tip, draft.next(forest.token(tip)))  # clean: near miss, prune of the root takes the children
        if nxt is None:
            break
        tip = nxt
    accepted = verify(forest, root)
    forest.prune(root)
    return accepted


def speculate_pair(forest, draft, verify):
    left = forest.sprout(forest.ROOT, draft.first())  # leak: when the left tree wins only the right is pruned
    right = forest.sprout(forest.ROOT, draft.second())  # leak: when the right tree wins only the left is pruned
    if left is None or right is None:
        raise CacheFull
    a, b = verify(forest, left), verify(forest, right)
    if len(a) >= len(b):
        forest.prune(right)
        return a
    forest.prune(left)
    return b


class TokenizerShelf:
    """Tokenizers by name. They are loaded once and stay for good."""

    def __init__(self, load):
        self._load = load
        self._loaded = {}

    def borrow(self, name):
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]


def count_tokens(shelf, name, text):
    tok = shelf.borrow(name)  # clean: a shared permanent object, nothing to give back
    if not text:
        return 0
    return len(tok.encode(text))
