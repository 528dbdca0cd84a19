"""Structured output: bitmask rows and matchers for a batch. Short on purpose."""
import heapq
import logging
import weakref

import numpy as np

log = logging.getLogger("grammar")


class NoRow(Exception): ...
class BadGrammar(Exception): ...
class DeadEnd(Exception): ...


class Rows:
    """Rows of one big bitmask tensor, lowest first so that the copy stays short."""

    def __init__(s, n, vocab):
        s.bits = np.full((n, (vocab + 31) // 32), -1, np.int32)
        s.heap = list(range(n))
        s.high = 0

    def get(s):
        if not s.heap: raise NoRow
        r = heapq.heappop(s.heap)  # clean: handed to the caller
        s.high = max(s.high, r + 1)
        return r

    def try_get(s):
        return s.get() if s.heap else None  # clean: handed to the caller

    def put(s, r):
        s.bits[r] = -1
        heapq.heappush(s.heap, r)


class Matchers:
    """Matchers are costly to make and cheap to reset."""

    def __init__(s, compiler, cap):
        s.compiler, s.cap = compiler, cap
        s.idle, s.made = {}, 0

    def borrow(s, key):
        stack = s.idle.get(key)
        if stack:
            m = stack.pop()  # leak: a matcher that does not reset is not put back, nor does made go down
            if not m.reset():
                log.warning("matcher for %s does not reset", key)
                return None
            return m
        if s.made >= s.cap: return None
        s.made += 1
        return s.compiler.matcher(key)  # clean: counted in made, handed to the caller

    def restore(s, key, m):
        s.idle.setdefault(key, []).append(m)


class Slot:
    """What a request with a grammar holds."""

    def __init__(s, eng, key, row, m):
        s.eng, s.key, s.row, s.m = eng, key, row, m
        s.draft_rows = []
        s.done = False

    def fill(s):
        if s.m.is_terminated(): s.done = True
        else: s.m.fill(s.eng.rows.bits[s.row])

    def accept(s, tok):
        if not s.m.accept(tok): raise DeadEnd(tok)

    def shed(s):
        rows, s.draft_rows = s.draft_rows, []
        for r in rows: s.eng.rows.put(r)

    def close(s):
        s.shed()
        if s.row is not None:
            s.eng.rows.put(s.row)
            s.row = None
        if s.m is not None and not s.done:
            s.eng.matchers.restore(s.key, s.m)
        s.m = None


class Engine:
    def __init__(s, compiler, n, vocab, cap):
        s.rows, s.matchers = Rows(n, vocab), Matchers(compiler, cap)
        s.slots, s.known = {}, set()

    def open(s, rid, key):
        if rid in s.slots: return s.slots[rid]
        row = s.rows.try_get()  # clean: near miss, put back without a matcher, else the slot has it and close() tests for None
        if row is None: return None
        m = s.matchers.borrow(key)  # leak: close() restores only while the grammar has not terminated, and a finished one is the common case
        if m is None:
            s.rows.put(row)
            return None
        slot = s.slots[rid] = Slot(s, key, row, m)
        s.known.add(key)
        return slot

    def close(s, rid):
        slot = s.slots.pop(rid, None)
        if slot: slot.close()

    def draft(s, rid, toks):
        """One more row for every drafted token. The rows stay with the slot until shed()."""
        slot = s.slots[rid]
        used = 0
        for t in toks:
            r = s.rows.try_get()  # clean: near miss, in draft_rows before anything can fail, and close() sheds too
            if r is None: break
            slot.draft_rows.append(r)
            if not slot.m.accept(t): break
            slot.m.fill(s.rows.bits[r])
            used += 1
        slot.m.rollback(used)
        return used

    def settle(s, rid, toks):
        slot = s.slots[rid]
        slot.shed()
        for t in toks: slot.accept(t)
        slot.fill()

    def jump(s, rid):
        """Forced continuation, if the grammar leaves no choice."""
        slot = s.slots[rid]
        r = s.rows.get()  # leak: DeadEnd out of accept() skips the put
        out = []
        while len(out) < 32:
            slot.m.fill(s.rows.bits[r])
            on = np.flatnonzero(np.unpackbits(s.rows.bits[r].view(np.uint8), bitorder="little"))
            if len(on) != 1: break
            slot.accept(int(on[0]))
            out.append(int(on[0]))
        s.rows.put(r)
        return out

    def step(s, sampled):
        """sampled: request id -> tokens. Returns the ids that ended."""
        ended = []
        for rid, toks in sampled.items():
            if rid not in s.slots: continue
            try:
                s.settle(rid, toks)
                s.jump(rid)
            except DeadEnd as e:
                log.info("%s: dead end at %s", rid, e)
                ended.append(rid)
            except NoRow:
                pass
            if rid in s.slots and s.slots[rid].done: ended.append(rid)
        for rid in ended: s.close(rid)
        return ended


def validate(eng, schema_keys):
    """Which of the schemas accept the empty object?"""
    good = []
    for k in schema_keys:
        m = eng.matchers.borrow(k)  # clean: restored in the finally whatever the loop does
        if m is None: continue
        try:
            if not m.accept(123) or not m.accept(125): continue
            good.append(k)
        finally:
            eng.matchers.restore(k, m)
    return good


def overlap(eng, a, b):
    """Share of the vocabulary that both grammars allow at the start."""
    ma = eng.matchers.borrow(a)  # leak: when the one of b is not to be had BadGrammar is raised with this one out
    if ma is None: raise BadGrammar(a)
    mb = eng.matchers.borrow(b)  # clean: restored at the end
    if mb is None: raise BadGrammar(b)
    xa, xb = np.empty((2, eng.rows.bits.shape[1]), np.int32)
    ma.fill(xa)
    mb.fill(xb)
    both = np.bitwise_count((xa & xb).view(np.uint32)).sum()
    eng.matchers.restore(a, ma)
    eng.matchers.restore(b, mb)
    return int(both)


class Session:
    """A chat in which several grammars follow one another."""

    def __init__(s, eng, rid):
        s.eng, s.rid, s.row = eng, rid, None
        s.fin = weakref.finalize(s, eng.close, rid)

    def begin(s, key):
        s.eng.close(s.rid)
        return s.eng.open(s.rid, key) is not None  # clean: near miss, the result is only tested, but the slot is found by its id when it is closed

    def scratch(s):
        if s.row is None:
            s.row = s.eng.rows.get()  # leak: the finalizer of a session that is never ended closes the slot and knows nothing of this row
        return s.eng.rows.bits[s.row]

    def end(s):
        s.fin.detach()
        s.eng.close(s.rid)
        if s.row is not None:
            s.eng.rows.put(s.row)
            s.row = None
