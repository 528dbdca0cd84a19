"""Speculative decoding: draft slots, verification scratch and per-request draft state."""
from __future__ import annotations

import random
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, NamedTuple, Optional

import torch


class DraftSlots:
    def __init__(self, n: int, depth: int, vocab: int) -> None:
        self.logits = torch.empty(n, depth, vocab)
        self.depth = depth
        self._vacant = deque(range(n))

    def occupy(self) -> int:
        """-1 when all are occupied."""
        return self._vacant.popleft() if self._vacant else -1

    def vacate(self, slot: int) -> None:
        self._vacant.append(slot)


class Scratch:
    """Stack of scratch tensors, shared by verifier and sampler."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._stack: list[torch.Tensor] = []

    def pop(self) -> torch.Tensor:
        return self._stack.pop() if self._stack else torch.empty(self.shape)

    def push(self, t: torch.Tensor) -> None:
        self._stack.append(t)

    @contextmanager
    def lease(self) -> Iterator[torch.Tensor]:
        t = self.pop()  # clean: pushed in finally
        try:
            yield t
        finally:
            self.push(t)

    @contextmanager
    def pair(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = self.pop()  # clean: pushed in finally
        second = self.pop()  # leak: only the first of the pair is pushed
        try:
            yield first, second
        finally:
            self.push(first)


class Verdict(NamedTuple):
    accepted: int
    probs: Optional[torch.Tensor]


@dataclass
class DraftState:
    rid: str
    slot: int = -1
    proposed: list[int] = field(default_factory=list)
    history: list[float] = field(default_factory=list)
    disabled: bool = False


class Speculator:
    def __init__(self, slots: DraftSlots, scratch: Scratch, draft_model, floor: float = 0.3) -> None:
        self.slots = slots
        self.scratch = scratch
        self.draft_model = draft_model
        self.floor = floor
        self.states: dict[str, DraftState] = {}
        self.trees: dict[str, list[int]] = {}

    def attach(self, rid: str) -> DraftState:
        state = self.states.get(rid)
        if state is None:
            state = DraftState(rid, self.slots.occupy())  # clean: near miss, detach vacates what is not -1
            state.disabled = state.slot < 0
            self.states[rid] = state
        return state

    def detach(self, rid: str) -> None:
        state = self.states.pop(rid, None)
        if state is not None and state.slot >= 0:
            self.slots.vacate(state.slot)

    def propose(self, rid: str, tokens: list[int]) -> list[int]:
        state = self.attach(rid)  # clean: near miss, kept in states until detach
        if state.disabled:
            return []
        out = []
        for d in range(self.slots.depth):
            logits = self.draft_model(tokens + out)
            self.slots.logits[state.slot, d].copy_(logits)
            out.append(int(logits.argmax()))
        state.proposed = out
        return out

    def one_shot(self, tokens: list[int]) -> Optional[list[int]]:
        """No state kept: for benchmark traffic."""
        slot = self.slots.occupy()  # leak: a draft that ends at once is returned without vacating
        if slot < 0:
            return None
        out: list[int] = []
        for d in range(self.slots.depth):
            logits = self.draft_model(tokens + out)
            self.slots.logits[slot, d].copy_(logits)
            token = int(logits.argmax())
            if token == 0:
                return out
            out.append(token)
        self.slots.vacate(slot)
        return out

    def _target_probs(self, logits: torch.Tensor) -> torch.Tensor:
        t = self.scratch.pop()  # clean: handed to the caller
        torch.softmax(logits, dim=-1, out=t)
        return t

    def _verify(self, state: DraftState, logits: torch.Tensor, keep_probs: bool) -> Verdict:
        probs = self._target_probs(logits)  # clean: near miss, in the verdict when kept, else pushed
        accepted = 0
        for i, token in enumerate(state.proposed):
            if random.random() > float(probs[i, token]):
                break
            accepted += 1
        state.history.append(accepted / max(1, len(state.proposed)))
        if keep_probs:
            return Verdict(accepted, probs)
        self.scratch.push(probs)
        return Verdict(accepted, None)

    def accept(self, rid: str, logits: torch.Tensor) -> list[int]:
        state = self.states[rid]
        verdict = self._verify(state, logits, keep_probs=False)  # clean: near miss, without probs it carries no lease
        return state.proposed[: verdict.accepted]

    def accept_and_resample(self, rid: str, logits: torch.Tensor) -> list[int]:
        state = self.states[rid]
        verdict = self._verify(state, logits, keep_probs=True)  # leak: full acceptance returns with the probabilities
        out = state.proposed[: verdict.accepted]
        if verdict.accepted == len(state.proposed):
            return out
        row = verdict.probs[verdict.accepted]
        out.append(int(torch.multinomial(row, 1)))
        self.scratch.push(verdict.probs)
        return out

    def logprobs(self, rid: str, logits: torch.Tensor) -> list[float]:
        verdict = self._verify(self.states[rid], logits, keep_probs=True)  # clean: pushed before the return
        values = [float(verdict.probs[i].max().log()) for i in range(verdict.accepted)]
        self.scratch.push(verdict.probs)
        return values

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        probs = self._target_probs(logits)  # leak: the sum is returned and the scratch tensor dropped
        return -(probs * probs.clamp_min(1e-9).log()).sum(-1)

    def kl(self, a: torch.Tensor, b: torch.Tensor) -> float:
        with self.scratch.lease() as p, self.scratch.lease() as q:  # clean: two context managers
            torch.softmax(a, dim=-1, out=p)
            torch.softmax(b, dim=-1, out=q)
            return float((p * (p / q).log()).sum())

    def swap_test(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        with self.scratch.pair() as (p, q):  # clean: the manager's own body answers for the pair
            p.copy_(a)
            q.copy_(b)
            return bool((p.argmax(-1) == q.argmax(-1)).all())

    def grow_tree(self, rid: str, width: int) -> int:
        nodes: list[int] = []
        for _ in range(width):
            node = self.slots.occupy()  # clean: near miss, -1 is no slot, the rest lies in trees until cut_tree
            if node == -1:
                break
            nodes.append(node)
        self.trees.setdefault(rid, []).extend(nodes)
        return len(nodes)

    def cut_tree(self, rid: str) -> None:
        for node in self.trees.pop(rid, []):
            self.slots.vacate(node)

    def tune(self) -> int:
        """Turns drafting off where it does not pay."""
        off = 0
        for state in self.states.values():
            recent = state.history[-8:]
            if state.disabled or len(recent) < 8 or sum(recent) / 8 >= self.floor:
                continue
            self.slots.vacate(state.slot)
            state.slot = -1
            state.disabled = True
            off += 1
        return off

    def retry_disabled(self) -> int:
        on = 0
        for state in self.states.values():
            if not state.disabled:
                continue
            slot = self.slots.occupy()  # leak: slot 0 is taken for none by the truth test and stays occupied
            if slot and slot > 0:
                state.slot = slot
                state.disabled = False
                on += 1
        return on
