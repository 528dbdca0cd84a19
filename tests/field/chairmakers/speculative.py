"""Speculative decoding loop: a small drafter proposes, the target verifies.

Plain functions over a few dataclasses; the engine calls `drive()` once per step.
"""
import contextlib
import logging
import math
from dataclasses import dataclass, field

import numpy as np

log = logging.getLogger("spec")
EOS = 2


class ArenaFull(Exception):
    pass


class VerifyMismatch(Exception):
    pass


@dataclass
class SlotPool:
    """Slots of a KV cache with one row of pages per request."""
    name: str
    free: list
    busy: set = field(default_factory=set)

    def lease(self):
        if not self.free:
            return None
        slot = self.free.pop()  # clean: goes to the caller and into busy
        self.busy.add(slot)
        return slot

    def give_back(self, slot):
        if slot not in self.busy:
            raise ValueError(f"{self.name}: slot {slot} is not leased")
        self.busy.discard(slot)
        self.free.append(slot)


@dataclass
class Arena:
    """Rows of logits scratch, handed out as half-open spans."""
    spans: list

    def rent(self, n):
        for i, (lo, hi) in enumerate(self.spans):
            if hi - lo < n:
                continue
            lo, hi = self.spans.pop(i)  # clean: the tail is put back and the head goes to the caller
            if hi - lo > n:
                self.spans.insert(i, (lo + n, hi))
            return lo, lo + n
        raise ArenaFull(n)

    def restore(self, span):
        self.spans.append(span)
        self.spans.sort()
        merged = [self.spans[0]]
        for lo, hi in self.spans[1:]:
            if lo == merged[-1][1]:
                merged[-1] = (merged[-1][0], hi)
            else:
                merged.append((lo, hi))
        self.spans[:] = merged


@dataclass
class Pools:
    target: SlotPool
    draft: SlotPool
    arena: Arena
    probs: list = field(default_factory=list)


@dataclass
class SpecState:
    req_id: str
    target_slot: int
    draft_slot: int
    tokens: list
    accepted: int = 0
    proposed: int = 0


@dataclass
class Proposal:
    tokens: list
    rows: tuple


def take_probs(pools, vocab):
    if pools.probs:
        return pools.probs.pop()  # clean: handed to the caller
    return np.empty((16, vocab), dtype=np.float32)


@contextlib.contextmanager
def borrowed_probs(pools, vocab):
    buf = take_probs(pools, vocab)  # leak: no finally around the yield, and verify() raises VerifyMismatch out of the body
    yield buf
    pools.probs.append(buf)


@contextlib.contextmanager
def rented(arena, n):
    span = arena.rent(n)  # clean: restored in the finally
    try:
        yield span
    finally:
        arena.restore(span)


def start_request(pools, req_id, prompt):
    target = pools.target.lease()  # clean: near miss, handed back when the drafter has no slot, else owned by the state
    if target is None:
        return None
    draft = pools.draft.lease()  # clean: near miss, adopt_branch() may swap it for another but hands it back then
    if draft is None:
        pools.target.give_back(target)
        return None
    return SpecState(req_id, target, draft, list(prompt))


def finish(pools, state):
    pools.target.give_back(state.target_slot)
    if state.draft_slot is not None:
        pools.draft.give_back(state.draft_slot)
    rate = state.accepted / max(1, state.proposed)
    log.info("%s done, %d tokens, acceptance %.2f", state.req_id, len(state.tokens), rate)


def propose(pools, drafter, state, k):
    rows = pools.arena.rent(k)  # leak: when the first drafted token is EOS the caller gets None and nobody has the span
    drafted = []
    for i in range(k):
        tok = drafter.next_token(state.draft_slot, state.tokens + drafted, rows[0] + i)
        if tok == EOS and not drafted:
            return None
        drafted.append(tok)
        if tok == EOS:
            break
    state.proposed += len(drafted)
    return Proposal(drafted, rows)


def verify(pools, target, state, proposal):
    """Longest accepted prefix plus one token of the target."""
    with borrowed_probs(pools, target.vocab) as probs:  # leak: the raise below leaves through a context manager that has no finally
        target.score(state.target_slot, state.tokens, proposal.tokens, out=probs)
        if not np.isfinite(probs[: len(proposal.tokens)]).all():
            raise VerifyMismatch(state.req_id)
        out = []
        for i, tok in enumerate(proposal.tokens):
            if probs[i, tok] < math.exp(-4.0):
                out.append(int(probs[i].argmax()))
                break
            out.append(tok)
            state.accepted += 1
    return out


def adopt_branch(pools, drafter, state, width):
    """Try a few drafts side by side and go on with the best of them."""
    best, best_score = state.draft_slot, drafter.score_of(state.draft_slot)
    for _ in range(width):
        branch = pools.draft.lease()  # leak: a branch that is beaten by a later one is only rebound, never handed back
        if branch is None:
            break
        drafter.copy_cache(state.draft_slot, branch)
        score = drafter.score_of(branch)
        if score > best_score:
            best, best_score = branch, score
        else:
            pools.draft.give_back(branch)
    if best != state.draft_slot:
        pools.draft.give_back(state.draft_slot)
        state.draft_slot = best


def fallback_step(pools, target, state):
    with rented(pools.arena, 1) as row:  # clean: the context manager restores it
        tok = target.next_token(state.target_slot, state.tokens, row[0])
    state.tokens.append(tok)
    return tok == EOS


def warm_up(pools, target, sizes):
    for n in sizes:
        span = pools.arena.rent(n)  # leak: sizes the target does not support are skipped with the span in hand
        if n > target.max_verify:
            log.debug("size %d is above the limit, skipped", n)
            continue
        target.dummy_run(span)
        pools.arena.restore(span)


def drive(pools, drafter, target, states, k=4):
    """One step for every live request; returns those that ended."""
    ended = []
    for req_id, state in list(states.items()):
        if state.proposed and state.accepted < 0.3 * state.proposed:
            adopt_branch(pools, drafter, state, width=2)
        try:
            proposal = propose(pools, drafter, state, k)  # leak: VerifyMismatch out of verify() skips the restore
            if proposal is None:
                done = fallback_step(pools, target, state)
            else:
                out = verify(pools, target, state, proposal)
                pools.arena.restore(proposal.rows)
                state.tokens.extend(out)
                done = EOS in out
        except ArenaFull:
            done = fallback_step(pools, target, state)
        except VerifyMismatch:
            log.warning("%s: non-finite target scores, dropped", req_id)
            done = True
        if done:
            ended.append(req_id)
            finish(pools, states.pop(req_id))
    return ended


def admit(pools, queue, states):
    """Moves requests from the queue to the table while there are slots."""
    while queue:
        req_id, prompt = queue[0]
        if req_id in states:
            queue.pop(0)
            continue
        state = start_request(pools, req_id, prompt)  # clean: None means no slot was kept, otherwise drive() finishes the table's states
        if state is None:
            return
        states[req_id] = state
        queue.pop(0)


def cancel(pools, states, req_id):
    state = states.pop(req_id, None)
    if state is not None:
        finish(pools, state)


def drain(pools, drafter, target, states, limit=256):
    """Finish what is left at shutdown; whatever is too slow is cut off."""
    for _ in range(limit):
        if not states:
            return
        drive(pools, drafter, target, states)
    for req_id in list(states):
        cancel(pools, states, req_id)
