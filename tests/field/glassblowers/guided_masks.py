# Grammar matchers for guided decoding and the packed token bitmasks they fill.
#
# Module-level pools, because the sampler and the scheduler both import this file.

import functools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

logger = logging.getLogger("serving.guided")

VOCAB_WORDS = 4096
MAX_MASKS = 512

_masks = np.full((MAX_MASKS, VOCAB_WORDS), -1, dtype=np.int32)
_mask_stack = list(range(MAX_MASKS - 1, -1, -1))
_mask_lock = threading.Lock()

_matchers = {}
_matcher_refs = {}

compile_gate = threading.BoundedSemaphore(4)
_workers = ThreadPoolExecutor(2, thread_name_prefix="grammar")


# masks ----------------------------------------------------------------------


def mask_open():
    with _mask_lock:
        if not _mask_stack:
            return None
        return _mask_stack.pop()  # clean: returned to the caller


def mask_shut(i):
    _masks[i].fill(-1)
    with _mask_lock:
        _mask_stack.append(i)


def mask_open_batch(n):
    """A dict row -> mask index for n rows, or None."""
    got = {}
    for row in range(n):
        i = mask_open()  # clean: near miss, shut again on shortage
        if i is None:
            for j in got.values():
                mask_shut(j)
            return None
        got[row] = i
    return got


def mask_open_zeroed(words):
    i = mask_open()  # leak: a request for too many words returns without shutting it
    if i is None:
        return None
    if words > VOCAB_WORDS:
        logger.error("grammar needs %d words", words)
        return None
    _masks[i].fill(0)
    return i


# matchers -------------------------------------------------------------------


def matcher_hold(spec, compiler):
    """The compiled matcher of a grammar; one more holder is counted."""
    if spec not in _matchers:
        with compile_gate:
            _matchers[spec] = compiler(spec)
        _matcher_refs[spec] = 0
    _matcher_refs[spec] += 1
    return _matchers[spec]


def matcher_drop(spec):
    _matcher_refs[spec] -= 1
    if _matcher_refs[spec] == 0:
        del _matcher_refs[spec]
        del _matchers[spec]


def precompile(specs, compiler):
    """Compile in the background, at most four at a time."""
    futs = []
    for spec in specs:
        compile_gate.acquire()  # clean: near miss, the done callback releases in every outcome
        fut = _workers.submit(compiler, spec)
        fut.add_done_callback(lambda _f: compile_gate.release())
        futs.append(fut)
    return futs


def compile_now(spec, compiler, cache):
    compile_gate.acquire()  # leak: a cache hit returns without releasing the gate
    if spec in cache:
        return cache[spec]
    try:
        cache[spec] = compiler(spec)
    finally:
        compile_gate.release()
    return cache[spec]


# per-request state ----------------------------------------------------------


class Guide:
    """One request's grammar state. `shared_mask` guides borrow another guide's mask."""

    def __init__(self, spec, state, mask, shared_mask=False):
        self.spec = spec
        self.state = state
        self.mask = mask
        self.shared_mask = shared_mask

    def fill(self):
        if not self.shared_mask:
            self.state.fill_bitmask(_masks[self.mask])

    def release(self):
        if not self.shared_mask:
            mask_shut(self.mask)
        matcher_drop(self.spec)


def guide_start(spec, compiler):
    matcher = matcher_hold(spec, compiler)  # clean: dropped when there is no mask, else by Guide.release()
    mask = mask_open()  # clean: owned by the guide
    if mask is None:
        matcher_drop(spec)
        return None
    return Guide(spec, matcher.fork(), mask)


def guide_fork(guide):
    """Share the parent's mask until the child diverges."""
    matcher_hold(guide.spec, None)  # clean: near miss, the child's release() drops it
    return Guide(guide.spec, guide.state.fork(), guide.mask, shared_mask=True)


def guide_diverge(guide):
    if not guide.shared_mask:
        return True
    mask = mask_open()  # clean: near miss, the flag is cleared so that release() shuts it
    if mask is None:
        return False
    guide.mask = mask
    guide.shared_mask = False
    return True


def guide_switch(guide, spec, compiler):
    """Continue a request under another grammar (tool call -> free text)."""
    matcher = matcher_hold(spec, compiler)  # leak: not dropped when the new grammar rejects the text so far
    state = matcher.fork()
    if not state.accept_all(guide.state.history):
        return False
    old = guide.spec
    guide.spec, guide.state = spec, state
    matcher_drop(old)
    return True


class GuidedBatch:
    def __init__(self, compiler):
        self.compiler = compiler
        self.guides = {}

    def add(self, rid, spec):
        guide = guide_start(spec, self.compiler)  # clean: kept in self.guides, remove() releases it
        if guide is None:
            return False
        self.guides[rid] = guide
        return True

    def add_forked(self, rid, parent):
        guide = guide_fork(self.guides[parent])  # clean: released when it can not diverge, else kept
        if not guide_diverge(guide):
            guide.release()
            return False
        self.guides[rid] = guide
        return True

    def remove(self, rid):
        guide = self.guides.pop(rid, None)
        if guide is not None:
            guide.release()

    def finish_many(self, rids):
        done = [self.guides.pop(r) for r in rids if r in self.guides]
        for guide in done:
            guide.release()

    def bitmask(self, order):
        """Rows of packed masks in batch order; unguided rows are all ones."""
        rows = mask_open_batch(len(order))  # clean: every mask is shut after the copy
        if rows is None:
            return None
        for row, rid in enumerate(order):
            guide = self.guides.get(rid)
            if guide is None:
                continue
            guide.fill()
            _masks[rows[row]][:] = _masks[guide.mask]
        out = _masks[[rows[r] for r in range(len(order))]]
        for i in rows.values():
            mask_shut(i)
        return out

    def draft_bitmask(self, rid, tokens):
        """Masks along a draft; stops where the grammar rejects a token."""
        guide = self.guides[rid]
        state = guide.state.fork()
        out = []
        for token in tokens:
            i = mask_open()  # leak: break on a rejected token skips mask_shut
            if i is None:
                break
            state.fill_bitmask(_masks[i])
            if not state.accept(token):
                break
            out.append(_masks[i].copy())
            mask_shut(i)
        return out

    def jump_forward(self, rid):
        """Tokens the grammar forces, found on a zeroed mask."""
        i = mask_open_zeroed(VOCAB_WORDS)  # clean: shut in finally
        if i is None:
            return []
        try:
            return self.guides[rid].state.forced_tokens(_masks[i])
        finally:
            mask_shut(i)

    def count_allowed(self, rid):
        i = mask_open_zeroed(VOCAB_WORDS)  # leak: the mask is counted and dropped
        if i is None:
            return 0
        self.guides[rid].state.fill_bitmask(_masks[i])
        return int(np.unpackbits(_masks[i].view(np.uint8)).sum())

    def close(self):
        for rid in list(self.guides):
            self.remove(rid)


@functools.lru_cache(maxsize=None)
def plain_guide():
    return SimpleNamespace(mask=None, release=lambda: None)
