"""Verification and the per-step driver of speculative decoding."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch

from .draft import Drafter, Proposal
from .pool import ScratchPool


@dataclass
class Running:
    rid: str
    history: list[int] = field(default_factory=list)
    budget: int = 0

    @property
    def done(self) -> bool:
        return self.budget <= 0


class SpecEngine:
    def __init__(self, drafter: Drafter, scratch: ScratchPool, min_rate: float) -> None:
        self.drafter = drafter
        self.scratch = scratch
        self.min_rate = min_rate
        self.running: dict[str, Running] = {}
        self.pending: Optional[Proposal] = None
        self.accepted = 0
        self.proposed = 0

    def add(self, run: Running) -> bool:
        if not self.drafter.attach(run.rid):  # clean: finish() detaches
            return False
        self.running[run.rid] = run
        return True

    def finish(self, rid: str) -> None:
        self.running.pop(rid, None)
        self.drafter.detach(rid)

    def _target_probs(self, batch: int, depth: int) -> torch.Tensor:
        probs = self.scratch.lease(batch, depth)  # clean: handed to the caller
        probs.uniform_()
        return probs

    def _accept(self, prop: Proposal) -> torch.Tensor:
        batch = prop.tokens.shape[0]
        target = self._target_probs(batch, prop.depth)  # clean: restored below
        ratio = target / prop.probs.clamp_min(1e-6)
        mask = ratio >= torch.rand_like(ratio)
        self.scratch.restore(target)
        return mask.cumprod(dim=-1).sum(dim=-1)

    def step(self) -> int:
        batch = len(self.running)
        if batch == 0:
            return 0
        prop = self.drafter.propose(batch)  # clean: discarded at the end of the step
        counts = self._accept(prop).tolist()
        rows = prop.tokens.long().tolist()
        for run, count, row in zip(list(self.running.values()), counts, rows):
            run.history.extend(row[:count])
            run.budget -= count
            if run.done:
                self.finish(run.rid)
        self.drafter.discard(prop)
        self.accepted += sum(counts)
        self.proposed += batch * prop.depth
        return sum(counts)

    def step_or_fallback(self) -> int:
        batch = len(self.running)
        prop = self.drafter.propose(batch)  # leak: the fallback return does not discard the proposal
        rate = self.accepted / max(self.proposed, 1)
        if rate < self.min_rate:
            return self.plain_step()
        counts = self._accept(prop)
        self.drafter.discard(prop)
        return int(counts.sum())

    def plain_step(self) -> int:
        for run in self.running.values():
            run.history.append(0)
            run.budget -= 1
        return len(self.running)

    def launch(self) -> bool:
        """Asynchronous half: propose now, settle() on the next tick."""
        if self.pending is not None:
            return False
        self.pending = self.drafter.propose(len(self.running))  # clean: near miss, settle() discards it
        return True

    def settle(self) -> int:
        prop, self.pending = self.pending, None
        if prop is None:
            return 0
        counts = self._accept(prop)
        self.drafter.discard(prop)
        return int(counts.sum())

    def mean_target(self, depth: int) -> list[float]:
        means = self._target_probs(len(self.running), depth).mean(dim=0)  # leak: only averaged, not restored
        if means.numel() == 0:
            return []
        means.mul_(100.0)
        return means.tolist()
