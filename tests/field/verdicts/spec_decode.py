"""Draft/target speculative decoding with tentative KV slots."""
from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from typing import Optional

import torch

_LOG = logging.getLogger(__name__)


class OutOfSlots(RuntimeError):
    pass


class SlotMap:
    def __init__(self, size: int) -> None:
        self._bits = torch.zeros(size, dtype=torch.bool)
        self._hint = 0

    def allocate_slots(self, n: int) -> Optional[list[int]]:
        idle = torch.nonzero(~self._bits).flatten()[:n]
        if idle.numel() < n:
            return None
        self._bits[idle] = True
        return idle.tolist()

    def free_slots(self, slots: list[int]) -> None:
        if slots:
            self._bits[torch.tensor(slots)] = False

    def must_allocate(self, n: int) -> list[int]:
        slots = self.allocate_slots(n)  # clean: raised only for None, otherwise returned
        if slots is None:
            raise OutOfSlots(f"{n} slots wanted")
        return slots


class Verdict(enum.Enum):
    ACCEPT = 1
    PARTIAL = 2
    REJECT = 3


@dataclass
class DecodeState:
    rid: str
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    draft_slots: list[int] = field(default_factory=list)
    done: bool = False


class SpecDecoder:
    def __init__(self, draft, target, slots: SlotMap, k: int = 4) -> None:
        self.draft = draft
        self.target = target
        self.slots = slots
        self.k = k
        self.states: dict[str, DecodeState] = {}

    def _verify(self, tokens: list[int], proposal: list[int]) -> tuple[Verdict, int]:
        n = 0
        for tok in proposal:
            if self.target(tokens) != tok:
                break
            n += 1
        if n == len(proposal):
            return Verdict.ACCEPT, n
        return (Verdict.PARTIAL, n) if n else (Verdict.REJECT, 0)

    def step(self, state: DecodeState) -> int:
        tentative = self.slots.allocate_slots(self.k)  # clean: near miss, accepted part joins the state, rest is freed in every verdict
        if tentative is None:
            return 0
        proposal = self.draft(state.tokens, self.k)
        verdict, n = self._verify(state.tokens, proposal)
        if verdict is Verdict.REJECT:
            self.slots.free_slots(tentative)
            return 0
        state.slots.extend(tentative[:n])
        self.slots.free_slots(tentative[n:])
        state.tokens.extend(proposal[:n])
        return n

    def step_greedy(self, state: DecodeState) -> int:
        tentative = self.slots.allocate_slots(self.k)  # leak: on a partial verdict the rejected tail is never freed
        if tentative is None:
            return 0
        proposal = self.draft(state.tokens, self.k)
        verdict, n = self._verify(state.tokens, proposal)
        if verdict is Verdict.REJECT:
            self.slots.free_slots(tentative)
        elif verdict is Verdict.PARTIAL:
            state.slots += tentative[:n]
        else:
            state.slots += tentative
        return n

    def step_tree(self, state: DecodeState, width: int) -> Optional[list[int]]:
        branches = []
        for _ in range(width):
            b = self.slots.allocate_slots(self.k)  # clean: near miss, losing branches freed in the loop, the best one moves to the state
            if b is None:
                break
            branches.append(b)
        if not branches:
            return None
        scores = [self.target(state.tokens + [i]) for i in range(len(branches))]
        best = max(range(len(branches)), key=scores.__getitem__)
        for i, b in enumerate(branches):
            if i != best:
                self.slots.free_slots(b)
        state.slots.extend(branches[best])
        return branches[best]

    def admit(self, rid: str, prompt: list[int]) -> DecodeState:
        if rid in self.states:
            raise KeyError(f"{rid} is already running")
        state = DecodeState(rid, prompt, self.slots.must_allocate(len(prompt)))  # clean: the state owns the slots, retire frees them
        self.states[rid] = state
        return state

    def retire(self, rid: str) -> None:
        state = self.states.pop(rid)
        self.slots.free_slots(state.slots)
        self.slots.free_slots(state.draft_slots)
        state.slots, state.draft_slots = [], []

    def arm_draft(self, rid: str, depth: int) -> None:
        state = self.states[rid]
        if state.done:
            return
        state.draft_slots = self.slots.must_allocate(depth)  # leak: arming a second time overwrites the slots still held

    def restart(self, rid: str, prompt: list[int]) -> None:
        state = self.states[rid]
        self.slots.free_slots(state.slots)
        state.slots = self.slots.must_allocate(len(prompt))  # clean: near miss, the previous list was freed first
        state.tokens = prompt

    def try_batch(self, states: list[DecodeState]) -> bool:
        granted: list[tuple[DecodeState, list[int]]] = []
        for st in states:
            try:
                got = self.slots.must_allocate(self.k)  # leak: on OutOfSlots the earlier grants are abandoned
            except OutOfSlots:
                _LOG.info("batch of %d does not fit", len(states))
                return False
            granted.append((st, got))
        for st, got in granted:
            st.slots.extend(got)
        return True

    def try_batch_all(self, states: list[DecodeState]) -> bool:
        granted: list[tuple[DecodeState, list[int]]] = []
        try:
            for st in states:
                granted.append((st, self.slots.must_allocate(self.k)))  # clean: near miss, handler frees what was granted so far
        except OutOfSlots:
            for _, got in granted:
                self.slots.free_slots(got)
            return False
        for st, got in granted:
            st.slots.extend(got)
        return True

    def estimate_accept(self, prompts: list[list[int]]) -> float:
        hits = 0
        for p in prompts:
            self.slots.must_allocate(self.k)  # leak: the list of slots is discarded
            hits += self._verify(p, self.draft(p, self.k))[1]
        return hits / (self.k * max(1, len(prompts)))
