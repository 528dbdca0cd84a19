"""Sampling step: logits workspaces, grammar matchers and per-request RNG states."""
import collections
import threading

import torch


class Workspace:
    """One arena, bump-allocated with marks. Everything above a mark goes back with rewind()."""

    def __init__(self, floats):
        self.buf = torch.empty(floats)
        self.top = 0

    def mark(self):
        return self.top

    def carve(self, n):
        if self.top + n > self.buf.numel():
            raise MemoryError(f"workspace: {n} floats asked, {self.buf.numel() - self.top} left")
        view = self.buf[self.top:self.top + n]
        self.top += n
        return view

    def rewind(self, mark):
        self.top = mark


class frame:
    """`with frame(ws) as ws:` rewinds what the body carved."""

    def __init__(self, ws):
        self.ws = ws
        self._mark = None

    def __enter__(self):
        self._mark = self.ws.mark()
        return self.ws

    def __exit__(self, et, ev, tb):
        self.ws.rewind(self._mark)
        return False


class MatcherPool:
    """Grammar matchers are costly to compile, so they are kept by grammar."""

    def __init__(self, compiler, per_grammar=4):
        self.compiler = compiler
        self.per_grammar = per_grammar
        self._idle = collections.defaultdict(collections.deque)
        self._count = collections.Counter()
        self._cv = threading.Condition()

    def get_matcher(self, grammar):
        with self._cv:
            q = self._idle[grammar]
            if q:
                return q.popleft()
            if self._count[grammar] >= self.per_grammar:
                return None
            self._count[grammar] += 1
        return self.compiler.compile(grammar)

    def wait_matcher(self, grammar, timeout):
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle[grammar], timeout):
                return None
            m = self._idle[grammar].popleft()  # leak: a terminated matcher that cannot be reset is dropped with its count kept
            if m.terminated and not m.try_reset():
                return None
            return m

    def put_matcher(self, grammar, m):
        m.reset()
        with self._cv:
            self._idle[grammar].append(m)
            self._cv.notify()


class MatcherLease:
    """with-able lease; `keep()` hands the matcher over to the body for good."""

    def __init__(self, pool, grammar):
        self.pool = pool
        self.grammar = grammar
        self.m = None
        self.kept = False

    def __enter__(self):
        self.m = self.pool.get_matcher(self.grammar)  # clean: near miss, __exit__ puts it back unless keep() handed it over
        return self

    def keep(self):
        self.kept = True
        return self.m

    def __exit__(self, et, ev, tb):
        if self.m is None or self.kept:
            return False
        self.pool.put_matcher(self.grammar, self.m)
        return False


class StrictMatcherLease:
    """As MatcherLease, but a body that raised ValueError (bad token) swallows it."""

    def __init__(self, pool, grammar):
        self.pool = pool
        self.grammar = grammar

    def __enter__(self):
        self.m = self.pool.get_matcher(self.grammar)  # leak: __exit__ returns early on ValueError
        if self.m is None:
            raise RuntimeError("no matcher")
        return self.m

    def __exit__(self, et, ev, tb):
        if et is not None and issubclass(et, ValueError):
            return True
        self.pool.put_matcher(self.grammar, self.m)
        return False


class RngBank:
    """Philox states, handed out by index over a bitmap."""

    def __init__(self, n):
        self.n = n
        self.bits = 0

    def alloc_rng(self):
        for i in range(self.n):
            if not self.bits >> i & 1:
                self.bits |= 1 << i
                return i
        return -1

    def free_rng(self, i):
        self.bits &= ~(1 << i)


class SampleReq:
    def __init__(self, rid, grammar=None, seed=None, top_k=0):
        self.rid = rid
        self.grammar = grammar
        self.seed = seed
        self.top_k = top_k
        self.matcher = None
        self.rng = -1


class Sampler:
    def __init__(self, ws, matchers, rngs, vocab):
        self.ws = ws
        self.matchers = matchers
        self.rngs = rngs
        self.vocab = vocab
        self.reqs = {}

    def add(self, req):
        if req.grammar is not None:
            req.matcher = self.matchers.get_matcher(req.grammar)  # clean: put back when no RNG is free, else by remove()
            if req.matcher is None:
                return False
        if req.seed is not None:
            req.rng = self.rngs.alloc_rng()  # clean: near miss, held under the same condition by which remove() frees it
            if req.rng < 0:
                if req.matcher is not None:
                    self.matchers.put_matcher(req.grammar, req.matcher)
                    req.matcher = None
                return False
        self.reqs[req.rid] = req
        return True

    def remove(self, rid):
        req = self.reqs.pop(rid)
        if req.grammar is not None:
            self.matchers.put_matcher(req.grammar, req.matcher)
        if req.seed is not None:
            self.rngs.free_rng(req.rng)

    def fork(self, req, child):
        """n > 1: the child samples with its own RNG and a matcher in the parent's state."""
        child.rng = self.rngs.alloc_rng()  # leak: not freed when no matcher is left for the child
        if child.rng < 0:
            return False
        if req.grammar is not None:
            m = self.matchers.get_matcher(req.grammar)  # clean: moved into the child, removed with it
            if m is None:
                return False
            m.copy_state(req.matcher)
            child.matcher = m
        child.grammar, child.seed = req.grammar, req.seed or 0
        self.reqs[child.rid] = child
        return True

    def swap_grammar(self, rid, grammar):
        """Tool calls change the grammar in the middle of an answer."""
        req = self.reqs[rid]
        with MatcherLease(self.matchers, grammar) as lease:  # clean: kept by the request, whose old matcher is put back
            if lease.m is None:
                return False
            if not lease.m.accepts_prefix(req.rid):
                return False
            if req.matcher is not None:
                self.matchers.put_matcher(req.grammar, req.matcher)
            req.matcher = lease.keep()
            req.grammar = grammar
        return True

    # -- a step -----------------------------------------------------------

    def masked(self, logits, req):
        with frame(self.ws) as ws:
            mask = ws.carve(self.vocab)  # clean: the frame rewinds it
            mask.zero_()
            req.matcher.fill_mask(mask)
            return logits + mask

    def top_k(self, logits, k):
        m = self.ws.mark()
        work = self.ws.carve(logits.numel())  # leak: not rewound when k covers the whole vocabulary
        work.copy_(logits.view(-1))
        if k >= logits.shape[-1]:
            return logits
        kth = work.view_as(logits).topk(k).values[..., -1:]
        out = logits.masked_fill(logits < kth, float("-inf"))
        self.ws.rewind(m)
        return out

    def min_p(self, logits, p):
        m = self.ws.mark()
        probs = self.ws.carve(logits.numel()).view_as(logits)  # clean: rewound in finally
        try:
            torch.softmax(logits, -1, out=probs)
            if p <= 0:
                return logits
            return logits.masked_fill(probs < p * probs.max(-1, keepdim=True).values, float("-inf"))
        finally:
            self.ws.rewind(m)

    def jump_forward(self, grammar, prefix):
        """Tokens that the grammar leaves no choice about."""
        m = self.matchers.get_matcher(grammar)  # leak: the matcher is not put back when the prefix is refused
        if m is None:
            return []
        for t in prefix:
            if not m.accept(t):
                return []
        forced = m.forced_tokens()
        self.matchers.put_matcher(grammar, m)
        return forced

    def reseed(self, rid):
        req = self.reqs[rid]
        new = self.rngs.alloc_rng()  # clean: replaces the request's index, which is freed
        if new < 0:
            return
        if req.rng >= 0:
            self.rngs.free_rng(req.rng)
        req.rng, req.seed = new, req.seed or 0
