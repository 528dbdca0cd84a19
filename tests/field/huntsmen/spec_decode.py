"""Speculative decoding with a draft and a target model that keep their state in slots.

A slot is an index into the batch dimension of a model's cache.  The bank of the target
has counted slots, for forks share their prefix until they are written to.
"""
import dataclasses as dc
import math
import random
import time
from typing import Any, Callable

import numpy as np


class NoSlots(Exception): ...


class Diverged(Exception):
    """Draft and target disagree about the position."""


@dc.dataclass
class Bank:
    size: int
    name: str = "bank"
    free: list = dc.field(init=False)
    refs: np.ndarray = dc.field(init=False)
    pos: np.ndarray = dc.field(init=False)

    def __post_init__(self):
        self.free = list(range(self.size))
        self.refs = np.zeros(self.size, int)
        self.pos = np.zeros(self.size, int)

    def obtain(self) -> int:
        if not self.free:
            raise NoSlots(self.name)
        s = self.free.pop()  # clean: handed to the caller
        self.refs[s], self.pos[s] = 1, 0
        return s

    def obtain_pair(self) -> tuple[int, int]:
        """Two neighbours, for kernels that work on even and odd slot together."""
        self.free.sort()
        for i in range(len(self.free) - 1):
            if self.free[i] % 2 == 0 and self.free[i + 1] == self.free[i] + 1:
                hi = self.free.pop(i + 1)  # clean: near miss, half of the pair that is returned
                lo = self.free.pop(i)  # clean: half of the pair that is returned
                self.refs[[lo, hi]] = 1
                return lo, hi
        raise NoSlots(f"{self.name}: no pair")

    def relinquish(self, s: int) -> None:
        self.refs[s] -= 1
        if self.refs[s] == 0:
            self.free.append(s)

    def retain(self, s: int) -> int:
        self.refs[s] += 1
        return s

    def own(self, s: int) -> int:
        """The slot itself if it has one user, else a copy for the one who asks."""
        if self.refs[s] == 1:
            return s
        mine = self.obtain()  # clean: near miss, returned in the place of the shared one, which loses this user
        self.pos[mine] = self.pos[s]
        self.relinquish(s)
        return mine


@dc.dataclass
class Stream:
    """One request with a slot in each model."""
    rid: str
    prompt: list
    draft: int = -1
    target: int = -1
    out: list = dc.field(default_factory=list)
    accepted: int = 0
    proposed: int = 0
    paused: bool = False
    began: float = dc.field(default_factory=time.perf_counter)

    def rate(self):
        return self.accepted / max(1, self.proposed)


@dc.dataclass
class Engine:
    draft_bank: Bank
    target_bank: Bank
    propose: Callable[[int, list, int], list]
    verify: Callable[[int, list, list], int]
    k: int = 4
    live: dict = dc.field(default_factory=dict)
    trees: dict = dc.field(default_factory=dict)
    twins: dict = dc.field(default_factory=dict)
    log: Callable[[str], Any] = print

    # requests

    def _add(self, rid, prompt):
        st = Stream(rid, prompt)
        st.target = self.target_bank.obtain()  # leak: when the draft bank has no slot NoSlots leaves with the stream not registered
        st.draft = self.draft_bank.obtain()  # clean: registered on the next line, remove() relinquishes it
        self.live[rid] = st
        return st

    def add_target_only(self, rid, prompt):
        if rid in self.live:
            return None
        st = Stream(rid, prompt)
        st.target = self.target_bank.obtain()  # clean: near miss, the draft stays -1 and remove() knows it
        self.live[rid] = st
        return st

    def try_add(self, rid, prompt):
        if rid in self.live:
            return None
        try:
            return self._add(rid, prompt)
        except NoSlots as e:
            self.log(f"full: {e}")
            return None

    def remove(self, rid):
        st = self.live.pop(rid, None)
        if st is None:
            return
        if st.draft >= 0:
            self.draft_bank.relinquish(st.draft)
        self.target_bank.relinquish(st.target)
        st.draft = st.target = -1

    # one round

    def round(self, st):
        if st.draft < 0:
            st.out += [self.propose(st.target, st.out, 1)[0]]
            return 1
        guess = self.propose(st.draft, st.out, self.k)
        n = self.verify(st.target, st.out, guess)
        st.proposed += len(guess)
        st.accepted += n
        st.out += guess[:n]
        self.target_bank.pos[st.target] += n
        self.draft_bank.pos[st.draft] += n
        return n

    def round_rollback(self, st):
        """Keeps a copy of the draft slot to return to when the guess is refused."""
        back = self.draft_bank.obtain()  # leak: Diverged is raised below while the copy is held
        self.draft_bank.pos[back] = self.draft_bank.pos[st.draft]
        guess = self.propose(st.draft, st.out, self.k)
        n = self.verify(st.target, st.out, guess)
        if self.draft_bank.pos[st.draft] != self.target_bank.pos[st.target]:
            raise Diverged(st.rid)
        if n < len(guess):
            st.draft, back = back, st.draft
        self.draft_bank.relinquish(back)
        st.out += guess[:n]
        return n

    def step(self):
        done = []
        for rid, st in list(self.live.items()):
            if st.paused:
                continue
            try:
                self.round_rollback(st) if st.draft >= 0 and st.rate() < 0.3 else self.round(st)
            except Diverged as e:
                self.log(f"{e} diverged, goes on without draft")
                self.draft_bank.relinquish(st.draft)
                st.draft = -1
            except NoSlots:
                self.round(st)
            if st.out and st.out[-1] == 0:
                done.append(rid)
        for rid in done:
            self.remove(rid)
        return done

    # trees of guesses

    def grow_tree(self, rid, width):
        """`width` branches below the slot of a stream."""
        st = self.live[rid]
        branches = [self.target_bank.retain(st.target) for _ in range(width)]  # leak: prune_tree() skips the branches of score minus infinity
        self.trees[rid] = [[s, 0.0] for s in branches]

    def score_tree(self, rid, scores):
        for br, p in zip(self.trees[rid], scores):
            br[1] = math.log(p) if p > 0 else -math.inf

    def prune_tree(self, rid):
        best = -math.inf
        for slot, score in self.trees.pop(rid, ()):
            if score == -math.inf:
                continue
            best = max(best, score)
            self.target_bank.relinquish(slot)
        return best

    def write_branch(self, rid, i):
        br = self.trees[rid][i]
        br[0] = self.target_bank.own(br[0])  # leak: a copy that ends up with score minus infinity is skipped by prune_tree() too
        return br[0]

    # twins: the same prompt sampled several times, of which one is kept

    def clone(self, rid):
        src = self.live[rid]
        twin = Stream(rid, list(src.prompt), out=list(src.out))
        twin.target = self.target_bank.retain(src.target)  # leak: adopt() pops all twins of the stream and takes over the slot of one
        self.twins.setdefault(rid, []).append(twin)
        return twin

    def adopt(self, rid, pick):
        st = self.live[rid]
        twins = self.twins.pop(rid, [])
        if not twins:
            return False
        best = max(twins, key=pick)
        self.target_bank.relinquish(st.target)
        st.target, st.out = best.target, best.out
        return True

    def attach_draft(self, rid):
        """Give a stream a draft slot later, or another one after it went astray."""
        st = self.live[rid]
        fresh = self.draft_bank.obtain()  # clean: near miss, takes the place of the old one, remove() relinquishes it
        if st.draft >= 0:
            self.draft_bank.relinquish(st.draft)
        st.draft = fresh

    def calibrate(self, prompts, samples=3):
        """Acceptance of random prompts, on slots of their own."""
        rates = []
        for prompt in random.sample(prompts, samples):
            lo, hi = self.draft_bank.obtain_pair()  # leak: a prompt without guesses skips the relinquish of both
            guess = self.propose(lo, prompt, self.k)
            if not guess:
                continue
            rates.append(self.verify(hi, prompt, guess) / len(guess))
            self.draft_bank.relinquish(lo)
            self.draft_bank.relinquish(hi)
        return sum(rates) / max(1, len(rates))

    def close(self):
        for rid in list(self.trees):
            self.prune_tree(rid)
        for twins in self.twins.values():
            for twin in twins:
                self.target_bank.relinquish(twin.target)
        self.twins.clear()
        for rid in list(self.live):
            self.remove(rid)
