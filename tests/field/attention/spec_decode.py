from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import List, Optional, Protocol, Sequence, Set

import torch


class Proposer(Protocol):
    def propose(self, ctx: Sequence[int], k: int) -> List[int]: ...


@dataclass
class SpecConfig:
    num_spec_tokens: int = 4
    max_batch: int = 16
    accept_threshold: float = 0.9
    tree_width: int = 2


class LookaheadSlots:
    """Bitmap of draft positions inside the KV cache."""

    def __init__(self, total: int) -> None:
        self._used = [False] * total

    def reserve(self, n: int) -> Optional[List[int]]:
        idle = [i for i, u in enumerate(self._used) if not u]
        if len(idle) < n:
            return None
        chosen = idle[:n]
        for i in chosen:
            self._used[i] = True
        return chosen

    def unreserve(self, slots: Sequence[int]) -> None:
        for i in slots:
            self._used[i] = False

    @property
    def in_use(self) -> int:
        return sum(self._used)


@dataclass
class SpecState:
    tokens: List[int]
    draft: List[int] = field(default_factory=list)
    slots: List[int] = field(default_factory=list)


class SpecDecodeWorker:
    def __init__(self, cfg: SpecConfig, draft: Proposer, slots: LookaheadSlots) -> None:
        self.cfg = cfg
        self.draft = draft
        self.slots = slots
        self.skipped = 0

    def step(self, state: SpecState, target_probs: torch.Tensor) -> List[int]:
        k = self.cfg.num_spec_tokens
        slots = self.slots.reserve(k)  # clean: a None result ends early, otherwise unreserved at the end
        if slots is None:
            self.skipped += 1
            return []
        draft = self.draft.propose(state.tokens, k)
        accepted = self._verify(draft, target_probs)
        state.tokens.extend(accepted)
        self.slots.unreserve(slots)
        return accepted

    def step_accept_only(self, state: SpecState, target_probs: torch.Tensor) -> List[int]:
        slots = self.slots.reserve(self.cfg.num_spec_tokens)  # leak: only the slots of accepted tokens are handed back
        if not slots:
            return []
        draft = self.draft.propose(state.tokens, len(slots))
        accepted = self._verify(draft, target_probs)
        state.tokens.extend(accepted)
        self.slots.unreserve(slots[: len(accepted)])
        return accepted

    def step_split(self, state: SpecState, target_probs: torch.Tensor) -> List[int]:
        slots = self.slots.reserve(self.cfg.num_spec_tokens)  # clean: near miss, both parts of the split go back
        if not slots:
            return []
        accepted = self._verify(self.draft.propose(state.tokens, len(slots)), target_probs)
        good, bad = slots[: len(accepted)], slots[len(accepted):]
        self.slots.unreserve(bad)
        state.tokens.extend(accepted)
        self.slots.unreserve(good)
        return accepted

    def _verify(self, draft: List[int], probs: torch.Tensor) -> List[int]:
        ok: List[int] = []
        for i, t in enumerate(draft):
            if probs[i, t].item() < random.random() * self.cfg.accept_threshold:
                break
            ok.append(t)
        return ok

    def tree_step(self, state: SpecState, probs: torch.Tensor) -> Optional[List[int]]:
        trunk = self.slots.reserve(self.cfg.num_spec_tokens)  # leak: stays reserved when the branches cannot be had
        if trunk is None:
            return None
        branches = self.slots.reserve(self.cfg.num_spec_tokens * self.cfg.tree_width)  # clean: unreserved at the end
        if branches is None:
            return None
        out = self._verify(self.draft.propose(state.tokens, len(trunk)), probs)
        self.slots.unreserve(branches)
        self.slots.unreserve(trunk)
        return out

    def begin(self, state: SpecState) -> bool:
        if state.slots:
            self.abort(state)
        got = self.slots.reserve(self.cfg.num_spec_tokens)  # clean: kept in the state, commit and abort unreserve it
        if got is None:
            return False
        state.slots = got
        state.draft = self.draft.propose(state.tokens, len(got))
        return True

    def commit(self, state: SpecState, probs: torch.Tensor) -> int:
        good = self._verify(state.draft, probs)
        state.tokens.extend(good)
        self.slots.unreserve(state.slots)
        state.slots = []
        return len(good)

    def abort(self, state: SpecState) -> None:
        self.slots.unreserve(state.slots)
        state.slots = []
        state.draft.clear()

    def with_retry(self, state: SpecState, probs: torch.Tensor, tries: int = 3) -> List[int]:
        best: List[int] = []
        for _ in range(tries):
            slots = self.slots.reserve(self.cfg.num_spec_tokens)  # leak: a full acceptance returns from inside the loop
            if slots is None:
                break
            got = self._verify(self.draft.propose(state.tokens, len(slots)), probs)
            if len(got) == len(slots):
                return got
            best = max(best, got, key=len)
            self.slots.unreserve(slots)
        return best


def simulate(worker: SpecDecodeWorker, prompts: List[List[int]], probs: torch.Tensor) -> float:
    total = 0
    seen: Set[int] = set()
    for i, p in enumerate(prompts):
        st = SpecState(tokens=list(p))
        if not worker.begin(st):  # clean: commit or abort follows for every started state
            continue
        seen.add(i)
        if len(p) > 1024:
            worker.abort(st)
            continue
        total += worker.commit(st, probs)
    return total / max(1, len(seen))
