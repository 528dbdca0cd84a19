"""Beam search over forked sequences whose state handles are reference counted."""
from __future__ import annotations

import math


class StateHandle:
    __slots__ = ("sid", "refcount", "payload")

    def __init__(self, sid):
        self.sid = sid
        self.refcount = 0
        self.payload = None


class StatePool:
    def __init__(self, n):
        self._spare = [StateHandle(i) for i in range(n)]

    def new_state(self):
        if not self._spare:
            return None
        st = self._spare.pop()  # clean: returned with a count of one
        st.refcount = 1
        return st

    def incref(self, st):
        st.refcount += 1  # clean: the caller owns the count
        return st

    def decref(self, st):
        st.refcount -= 1
        if st.refcount == 0:
            st.payload = None
            self._spare.append(st)


class Beam:
    def __init__(self, state, tokens, score):
        self.state = state
        self.tokens = tokens
        self.score = score


class BeamGroup:
    def __init__(self, pool, width, eos):
        self.pool = pool
        self.width = width
        self.eos = eos
        self.beams = []
        self.done = []

    def seed(self, prompt):
        if self.beams:
            return False
        st = self.pool.new_state()  # clean: the beam list owns it, close() drops it
        if st is None:
            return False
        self.beams.append(Beam(st, list(prompt), 0.0))
        return True

    def _candidates(self, logits):
        out = []
        for beam in self.beams:
            for tok, p in logits:
                out.append((beam, tok, beam.score + math.log(p)))
        out.sort(key=lambda c: -c[2])
        return out

    def step(self, logits):
        nxt = []
        for beam, tok, score in self._candidates(logits):
            if len(nxt) == self.width:
                break
            st = self.pool.incref(beam.state)  # leak: a candidate that ends in eos is recorded without its state
            if tok == self.eos:
                self.done.append((beam.tokens + [tok], score))
                continue
            nxt.append(Beam(st, beam.tokens + [tok], score))
        for beam in self.beams:
            self.pool.decref(beam.state)
        self.beams = nxt

    def step_exact(self, logits):
        nxt = []
        for beam, tok, score in self._candidates(logits):
            if len(nxt) == self.width:
                break
            if tok == self.eos:
                self.done.append((beam.tokens + [tok], score))
                continue
            st = self.pool.incref(beam.state)  # clean: near miss, the new beam owns the count and the old beams are dropped
            nxt.append(Beam(st, beam.tokens + [tok], score))
        for beam in self.beams:
            self.pool.decref(beam.state)
        self.beams = nxt

    def diversify(self, i):
        if i >= len(self.beams):
            return None
        beam = self.beams[i]
        fresh = self.pool.new_state()  # leak: overwrites the beam's state whose count is never dropped
        if fresh is None:
            return None
        fresh.payload = beam.state.payload
        beam.state = fresh
        return beam

    def split_state(self, i):
        beam = self.beams[i]
        if beam.state.refcount == 1:
            return beam.state
        own = self.pool.new_state()  # clean: near miss, swapped in and the shared one is dropped
        if own is None:
            return beam.state
        own.payload = beam.state.payload
        shared, beam.state = beam.state, own
        self.pool.decref(shared)
        return own

    def close(self):
        for beam in self.beams:
            self.pool.decref(beam.state)
        self.beams = []


class BeamServer:
    def __init__(self, pool, width, eos):
        self.pool = pool
        self.width = width
        self.eos = eos
        self.snapshots = {}

    def snapshot(self, rid, beam):
        old = self.snapshots.pop(rid, None)
        if old is not None:
            self.pool.decref(old)
        self.snapshots[rid] = self.pool.incref(beam.state)  # leak: cancel() pops the snapshot without a decref

    def cancel(self, rid):
        return self.snapshots.pop(rid, None) is not None

    def score(self, beam, words):
        st = self.pool.incref(beam.state)  # leak: the stop-word return keeps the count
        total = beam.score
        for w in words:
            if w == self.eos:
                return total
            total -= 1.0 / (1 + st.sid)
        self.pool.decref(st)
        return total

    def rescore(self, beam, words):
        st = self.pool.incref(beam.state)  # clean: near miss, dropped in the finally whichever return is taken
        try:
            for w in words:
                if w == self.eos:
                    return beam.score
            return beam.score - st.sid
        finally:
            self.pool.decref(st)

    def peek(self, beams):
        refs = [self.pool.incref(b.state) for b in beams if b.score > -50]  # clean: every reference of the list is dropped
        ids = [st.sid for st in refs]
        for st in refs:
            self.pool.decref(st)
        return ids


def stream_states(pool, n):
    """Yields n temporary states, one at a time."""
    for _ in range(n):
        st = pool.new_state()  # leak: a consumer that stops early abandons the generator at the yield
        if st is None:
            return
        yield st
        pool.decref(st)


def first_even(pool, n):
    for st in stream_states(pool, n):
        if st.sid % 2 == 0:
            return st.sid
    return -1
