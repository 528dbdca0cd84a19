"""Step and token budgets of the curriculum: stages draw allowances, and settle what they did not use."""
from __future__ import annotations

import contextlib
import logging
import math
import threading
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Protocol

log = logging.getLogger("curriculum")


@dataclass
class Allowance:
    stage: str
    amount: int
    used: int = 0

    def charge(self, n: int) -> bool:
        if self.used + n > self.amount:
            return False
        self.used += n
        return True


class Purse(Protocol):
    def draw(self, stage: str, amount: int) -> Optional[Allowance]: ...

    def settle(self, allowance: Allowance) -> None: ...


class StepBudget:
    """The amounts of all drawn allowances are out until settle()."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._out: List[Allowance] = []
        self._lock = threading.Lock()

    def draw(self, stage: str, amount: int) -> Optional[Allowance]:
        with self._lock:
            if amount > self._left:
                return None
            self._left -= amount
            allowance = Allowance(stage, amount)
            self._out.append(allowance)
            return allowance

    def settle(self, allowance: Allowance) -> None:
        with self._lock:
            self._out.remove(allowance)
            self._left += allowance.amount

    @property
    def left(self) -> int:
        return self._left


class MeteredBudget:
    """A purse around a purse: counts the draws by stage."""

    def __init__(self, inner: Purse) -> None:
        self.inner = inner
        self.counts: Dict[str, int] = {}

    def draw(self, stage: str, amount: int) -> Optional[Allowance]:
        self.counts[stage] = self.counts.get(stage, 0) + 1
        return self.inner.draw(stage, amount)  # clean: handed to the caller

    def settle(self, allowance: Allowance) -> None:
        self.inner.settle(allowance)


class CappedBudget:
    """A purse around a purse: at most `cap` draws of a stage."""

    def __init__(self, inner: StepBudget, cap: int) -> None:
        self.inner, self.cap = inner, cap
        self.counts: Dict[str, int] = {}

    def draw(self, stage: str, amount: int) -> Optional[Allowance]:
        allowance = self.inner.draw(stage, amount)  # leak: over the cap answers None, still drawn
        if allowance is None:
            return None
        n = self.counts.get(stage, 0) + 1
        if n > self.cap:
            log.info("stage %s over its cap", stage)
            return None
        self.counts[stage] = n
        return allowance

    def settle(self, allowance: Allowance) -> None:
        self.counts[allowance.stage] -= 1
        self.inner.settle(allowance)


@contextlib.contextmanager
def allowance_for(budget: StepBudget, stage: str, amount: int) -> Iterator[Optional[Allowance]]:
    allowance = budget.draw(stage, amount)  # clean: settled in finally when there is one
    try:
        yield allowance
    finally:
        if allowance is not None:
            budget.settle(allowance)


def train_stage(budget: StepBudget, stage: str, amount: int, step: Callable[[], int]) -> int:
    with allowance_for(budget, stage, amount) as allowance:  # clean: settled on exit, also for the return
        if allowance is None:
            return 0
        while allowance.charge(step()):
            if allowance.used * 2 > amount and amount > 1_000_000:
                return allowance.used
        return allowance.used


def draw_shrinking(budget: StepBudget, stage: str, amount: int) -> Optional[Allowance]:
    """Half as much until it fits; the caller settles."""
    while amount > 0:
        allowance = budget.draw(stage, amount)  # clean: handed to the caller
        if allowance is not None:
            return allowance
        amount //= 2
    return None


def largest_fit(budget: StepBudget, stage: str, amount: int) -> int:
    allowance = draw_shrinking(budget, stage, amount)  # leak: only the number is kept, no settle
    return 0 if allowance is None else allowance.amount


def top_up(budget: StepBudget, allowance: Allowance, extra: int) -> Allowance:
    """The answer replaces the argument, which is settled when there was more."""
    bigger = budget.draw(allowance.stage, allowance.amount + extra)  # clean: handed to the caller
    if bigger is None:
        return allowance
    bigger.used = allowance.used
    budget.settle(allowance)
    return bigger


def long_stage(budget: StepBudget, stage: str, step: Callable[[], int], rounds: int) -> int:
    allowance = budget.draw(stage, 100)  # clean: near miss, top_up() settles the one that it replaces
    if allowance is None:
        return 0
    for _ in range(rounds):
        if not allowance.charge(step()):
            allowance = top_up(budget, allowance, 100)  # clean: settled after the loop or by the next top_up
    budget.settle(allowance)
    return allowance.used


def escalate(budget: StepBudget, stage: str, step: Callable[[], int], rounds: int) -> int:
    allowance = budget.draw(stage, 100)  # leak: a larger one takes its name, no settle
    if allowance is None:
        return 0
    for _ in range(rounds):
        if not allowance.charge(step()):
            larger = budget.draw(stage, allowance.amount * 2)  # leak: the next larger one replaces it
            if larger is None:
                break
            larger.used = allowance.used
            allowance = larger
    budget.settle(allowance)
    return allowance.used


class StageMachine:
    """One stage at a time. leave() settles the stage, enter() leaves the previous one."""

    def __init__(self, purse: MeteredBudget) -> None:
        self.purse = purse
        self.current: Optional[Allowance] = None
        self.history: List[str] = []

    def enter(self, stage: str, amount: int) -> bool:
        self.leave()
        self.current = self.purse.draw(stage, amount)  # clean: near miss, leave() was called before
        return self.current is not None

    def leave(self) -> None:
        done, self.current = self.current, None
        if done is not None:
            self.history.append(done.stage)
            self.purse.settle(done)


class StageTree:
    """Stages with sub-stages; closing a stage closes what is below it."""

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.stack: List[Allowance] = []

    def descend(self, stage: str) -> bool:
        share = math.floor(self.budget.left / 2)
        allowance = self.budget.draw(stage, share)  # leak: ascend_to() settles one of those it cuts off
        if allowance is None:
            return False
        self.stack.append(allowance)
        return True

    def ascend_to(self, depth: int) -> int:
        removed = self.stack[depth:]
        self.stack = self.stack[:depth]
        if removed:
            self.budget.settle(removed[-1])
        return len(removed)
