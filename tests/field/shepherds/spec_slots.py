"""Speculative decoding: draft slots, verification and fallback.

Every sequence that drafts holds one DraftSlot, a row of the draft model's KV cache. Rows are scarce; sequences
without one decode plainly.
"""
from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("spec")

@dataclass
class DraftSlot:
    row: int
    generation: int = 0
    cached: int = 0

    def rewind(self, n: int) -> None:
        self.cached = max(0, self.cached - n)

class DraftOverflow(Exception):
    """The draft row is as long as the draft cache allows."""

@dataclass
class SlotBank:
    rows: int
    row_len: int = 4096
    _vacant: list[DraftSlot] = field(default_factory=list)
    _out: int = 0

    def __post_init__(self) -> None:
        self._vacant = [DraftSlot(i) for i in range(self.rows)]

    def seat(self) -> Optional[DraftSlot]:
        while self._vacant:
            slot = self._vacant.pop()  # leak: a poisoned row is skipped, no list keeps it though unpoison() expects it back
            if slot.generation < 0:
                log.debug("row %d is poisoned", slot.row)
                continue
            slot.generation += 1
            slot.cached = 0
            self._out += 1
            return slot
        return None

    def vacate(self, slot: DraftSlot) -> None:
        self._out -= 1
        self._vacant.append(slot)

    def poison(self, slot: DraftSlot) -> None:
        """Do not hand the row out until unpoison(); it stays the bank's."""
        slot.generation = -abs(slot.generation) - 1
        self.vacate(slot)

    def unpoison(self) -> int:
        n = 0
        for slot in self._vacant:
            if slot.generation < 0:
                slot.generation = abs(slot.generation)
                n += 1
        return n

@dataclass
class SeqState:
    sid: int
    tokens: list[int]
    slot: Optional[DraftSlot] = None
    accepted: int = 0
    proposed: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else 1.0

@dataclass
class Drafter:
    bank: SlotBank
    model: object
    k: int = 4
    min_rate: float = 0.3
    seqs: dict[int, SeqState] = field(default_factory=dict)

    def add(self, sid: int, tokens: list[int]) -> SeqState:
        # a sid that comes again starts afresh
        self.remove(sid)
        state = SeqState(sid, list(tokens))
        state.slot = self.bank.seat()  # clean: None is allowed, and remove() or bench() vacates it
        self.seqs[sid] = state
        return state

    def remove(self, sid: int) -> None:
        state = self.seqs.pop(sid, None)
        if state is None:
            return
        if state.slot is not None:
            self.bank.vacate(state.slot)
            state.slot = None

    def bench(self, state: SeqState) -> None:
        """Too many rejected drafts: give up the row."""
        if state.slot is not None:
            log.info("seq %d benched at rate %.2f", state.sid, state.rate)
            self.bank.vacate(state.slot)
            state.slot = None

    def unbench(self) -> int:
        n = 0
        for state in self.seqs.values():
            if state.slot is not None:
                continue
            state.slot = self.bank.seat()  # clean: the state owns it, see remove()
            if state.slot is None:
                break
            state.proposed = state.accepted = 0
            n += 1
        return n

    def propose(self, state: SeqState) -> list[int]:
        if state.slot is None:
            return []
        if state.slot.cached + self.k > self.bank.row_len:
            raise DraftOverflow(f"row {state.slot.row}")
        drafts = self.model.draft(state.slot.row, state.tokens, self.k)
        state.slot.cached += len(drafts)
        state.proposed += len(drafts)
        return drafts

    def settle(self, state: SeqState, drafts: list[int], n_ok: int) -> None:
        state.accepted += n_ok
        state.tokens.extend(drafts[:n_ok])
        if state.slot is not None:
            state.slot.rewind(len(drafts) - n_ok)
        if state.proposed > 64 and state.rate < self.min_rate:
            self.bench(state)

    def clone(self, sid: int, new_sid: int) -> Optional[SeqState]:
        """Branch a sequence (n > 1). The branch drafts in a row of its own or not at all."""
        parent = self.seqs.get(sid)
        slot = self.bank.seat()  # leak: an unknown parent or a sid in use returns None with the row seated
        if parent is None or new_sid in self.seqs:
            return None
        child = SeqState(new_sid, list(parent.tokens), slot)
        if slot is not None and parent.slot is not None:
            self.model.copy_row(parent.slot.row, slot.row)
            slot.cached = parent.slot.cached
        self.seqs[new_sid] = child
        return child

    def reseat(self, state: SeqState) -> bool:
        """Move a sequence to a fresh row, for instance after an overflow."""
        fresh = self.bank.seat()  # clean: near miss, the old row is vacated before it is rebound
        if fresh is None:
            return False
        old = state.slot
        if old is not None:
            self.bank.vacate(old)
        state.slot = fresh
        return True

@dataclass
class TreeDraft:
    """Tree drafting: a root row and one row for each branch."""
    bank: SlotBank
    root: DraftSlot
    branches: list[DraftSlot] = field(default_factory=list)

    @classmethod
    def build(cls, bank: SlotBank, width: int) -> Optional["TreeDraft"]:
        root = bank.seat()  # leak: TreeDraft.close() vacates the branches only
        if root is None:
            return None
        tree = cls(bank, root)
        for _ in range(width):
            branch = bank.seat()  # clean: near miss, fewer branches than asked for is fine, close() vacates those there are
            if branch is None:
                break
            tree.branches.append(branch)
        return tree

    def prune(self, keep: Callable[[DraftSlot], bool]) -> None:
        kept = []
        for branch in self.branches:
            if keep(branch):
                kept.append(branch)
            else:
                self.bank.vacate(branch)
        self.branches = kept

    def close(self) -> None:
        for branch in self.branches:
            self.bank.vacate(branch)
        self.branches = []

def tree_step(bank: SlotBank, model, target, tokens: list[int], width: int) -> list[int]:
    tree = TreeDraft.build(bank, width)  # clean: closed in finally
    if tree is None:
        return [target.next(tokens)]
    try:
        paths = model.expand(tree.root.row, [b.row for b in tree.branches], tokens)
        return target.pick(tokens, paths)
    finally:
        tree.close()

def tune_k(bank: SlotBank, model, target, sample: list[list[int]], ks: list[int]) -> int:
    """Pick the draft length with the best yield."""
    best_k, best = ks[0], 0.0
    for k in ks:
        slot = bank.seat()  # leak: a sample prompt that overflows is caught outside the vacate
        if slot is None:
            log.warning("no row to tune with")
            return best_k
        got = 0
        try:
            for prompt in sample:
                if len(prompt) + k > bank.row_len:
                    raise DraftOverflow(str(len(prompt)))
                drafts = model.draft(slot.row, prompt, k)
                got += target.count_ok(prompt, drafts)
            bank.vacate(slot)
        except DraftOverflow:
            log.info("k=%d overflows", k)
            continue
        if got / k > best:
            best_k, best = k, got / k
    return best_k

def shadow_check(bank: SlotBank, model, reference, prompts, rate: float = 0.01) -> int:
    """Compare a quantised draft model with its reference on a random part of the traffic."""
    differing = 0
    for prompt in prompts:
        slot = bank.seat()  # leak: the prompts that are not sampled go on without vacate
        if slot is None:
            break
        if random.random() > rate:
            continue
        if model.draft(slot.row, prompt, 1) != reference.draft(slot.row, prompt, 1):
            differing += 1
            bank.poison(slot)
        else:
            bank.vacate(slot)
    return differing

def agreement(bank: SlotBank, model, prompts: list[list[int]], k: int) -> float:
    """How often the draft model says the same from two rows (it should, always)."""
    a = bank.seat()  # clean: near miss, vacated alone where there is no second row
    if a is None:
        return 1.0
    b = bank.seat()  # clean: vacated in finally
    if b is None:
        bank.vacate(a)
        return 1.0
    try:
        same = sum(model.draft(a.row, p, k) == model.draft(b.row, p, k) for p in prompts)
        return same / max(1, len(prompts))
    finally:
        for slot in (a, b):
            bank.vacate(slot)
