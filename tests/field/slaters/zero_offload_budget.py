"""ZeRO-style optimizer state placement under a host memory budget."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

log = logging.getLogger("zero.offload")


class BudgetExceeded(Exception):
    pass


@dataclass(frozen=True)
class Reservation:
    rid: int
    nbytes: int


class HostBudget:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._next = 0
        self._mu = threading.Lock()

    def reserve(self, nbytes: int) -> Reservation:
        self._mu.acquire()  # clean: released in finally, the raise included
        try:
            if self.used + nbytes > self.limit:
                raise BudgetExceeded(nbytes)
            self.used += nbytes
            self._next += 1
            return Reservation(self._next, nbytes)
        finally:
            self._mu.release()

    def unreserve(self, r: Reservation) -> None:
        with self._mu:
            self.used -= r.nbytes

    def resize(self, limit: int) -> bool:
        self._mu.acquire()  # leak: shrinking below the use returns with the lock held
        if limit < self.used:
            log.warning("cannot shrink to %d, %d in use", limit, self.used)
            return False
        self.limit = limit
        self._mu.release()
        return True


@dataclass
class ParamGroup:
    name: str
    numel: int
    trainable: bool = True


class OptimizerState:
    """exp_avg / exp_avg_sq of one group, on the host."""

    def __init__(self, group: ParamGroup, budget: HostBudget, reservation: Optional[Reservation] = None) -> None:
        self.group = group
        self.budget = budget
        self._owns = reservation is None
        if self._owns:
            reservation = budget.reserve(group.numel * 8)  # clean: near miss, close unreserves what the state owns
        self.reservation = reservation
        self.exp_avg = [0.0] * group.numel
        self.exp_avg_sq = [0.0] * group.numel

    def close(self) -> None:
        if self._owns and self.reservation is not None:
            self.budget.unreserve(self.reservation)
        self.reservation = None


class GradAccumulator:
    def __init__(self, group: ParamGroup, budget: HostBudget, shared: Optional[Reservation] = None) -> None:
        self.group = group
        self.budget = budget
        self.owns_memory = False
        if shared is None:
            self.mem = budget.reserve(group.numel * 4)  # leak: owns_memory stays False, so close never unreserves it
        else:
            self.mem = shared
        self.grad = [0.0] * group.numel

    def close(self) -> None:
        if self.owns_memory:
            self.budget.unreserve(self.mem)


class PartitionedOptimizer:
    def __init__(self, budget: HostBudget) -> None:
        self.budget = budget
        self.states: Dict[str, OptimizerState] = {}
        self.accum: Dict[str, GradAccumulator] = {}

    def add_group(self, group: ParamGroup) -> bool:
        if group.name in self.states:
            return True
        try:
            self.states[group.name] = OptimizerState(group, self.budget)  # clean: kept in states, closed by remove_group and close
        except BudgetExceeded:
            return False
        return True

    def add_fused(self, groups: List[ParamGroup]) -> bool:
        """One reservation shared by all groups of a fused kernel."""
        total = sum(g.numel for g in groups) * 8
        try:
            shared = self.budget.reserve(total)  # leak: handed to states that do not own it, nobody keeps it
        except BudgetExceeded:
            return False
        for g in groups:
            self.remove_group(g.name)
            self.states[g.name] = OptimizerState(g, self.budget, reservation=shared)  # clean: the state is closed, the reservation is not its own
        return True

    def add_accum(self, group: ParamGroup, scratch: Reservation) -> None:
        self.accum[group.name] = GradAccumulator(group, self.budget, shared=scratch)  # clean: near miss, memory belongs to the caller

    def remove_group(self, name: str) -> None:
        st = self.states.pop(name, None)
        if st is not None:
            st.close()

    def close(self) -> None:
        for name in list(self.states):
            self.remove_group(name)
        for acc in self.accum.values():
            acc.close()
        self.accum.clear()


def plan_placement(budget: HostBudget, groups: List[ParamGroup]) -> Tuple[List[Reservation], List[ParamGroup]]:
    """Returns reservations for what fits on the host and the groups that stay on the device."""
    placed: List[Reservation] = []
    on_device: List[ParamGroup] = []
    for g in groups:
        if not g.trainable:
            continue
        try:
            placed.append(budget.reserve(g.numel * 8))  # clean: near miss, returned in the list, a failed one took nothing
        except BudgetExceeded:
            on_device.append(g)
    return placed, on_device


def estimate_fit(budget: HostBudget, groups: List[ParamGroup]) -> float:
    placed, on_device = plan_placement(budget, groups)  # leak: only counted, the reservations are dropped
    return len(placed) / max(1, len(placed) + len(on_device))


def offload_groups(budget: HostBudget, groups: List[ParamGroup]) -> int:
    placed, on_device = plan_placement(budget, groups)  # clean: all unreserved
    for g in on_device:
        log.info("%s stays on the device", g.name)
    n = len(placed)
    for r in placed:
        budget.unreserve(r)
    return n


def step_with_scratch(budget: HostBudget, group: ParamGroup, grads: List[float], clip: float) -> Optional[float]:
    try:
        scratch = budget.reserve(group.numel * 4)  # clean: near miss, the except way took nothing, the rest has a finally
    except BudgetExceeded:
        return None
    try:
        norm = sum(g * g for g in grads) ** 0.5
        if norm > clip:
            return norm * clip
        return norm
    finally:
        budget.unreserve(scratch)


def reserve_for_resume(budget: HostBudget, group: ParamGroup, attempts: int = 3) -> Optional[Reservation]:
    """Tries with smaller and smaller working sets."""
    nbytes = group.numel * 16
    for _ in range(attempts):
        try:
            return budget.reserve(nbytes)  # clean: returned to the caller
        except BudgetExceeded:
            nbytes //= 2
    return None


def resume(budget: HostBudget, groups: List[ParamGroup], saved: Dict[str, List[float]]) -> List[str]:
    loaded: List[str] = []
    for g in groups:
        work = reserve_for_resume(budget, g)  # leak: groups with no saved state continue past the unreserve
        if work is None:
            break
        values = saved.get(g.name)
        if values is None or len(values) != g.numel:
            log.warning("no state for %s", g.name)
            continue
        loaded.append(g.name)
        budget.unreserve(work)
    return loaded


def rebalance(budget: HostBudget, a: ParamGroup, b: ParamGroup) -> bool:
    first = None
    try:
        first = budget.reserve(a.numel)  # clean: near miss, the handler rolls back the first one
        second = budget.reserve(b.numel)  # clean: unreserved below
    except BudgetExceeded:
        if first is not None:
            budget.unreserve(first)
        return False
    a.numel, b.numel = b.numel, a.numel
    budget.unreserve(second)
    budget.unreserve(first)
    return True


def main() -> None:
    budget = HostBudget(4096)
    groups = [ParamGroup("embed", 16), ParamGroup("mlp", 32), ParamGroup("norm", 4, trainable=False)]
    opt = PartitionedOptimizer(budget)
    for g in groups:
        opt.add_group(g)
    scratch = budget.reserve(64)  # clean: unreserved after close
    opt.add_accum(groups[0], scratch)
    opt.close()
    budget.unreserve(scratch)
    print(offload_groups(budget, groups), step_with_scratch(budget, groups[0], [3.0, 4.0], 1.0), rebalance(budget, groups[0], groups[1]))
    print(resume(budget, groups[:1], {"embed": [0.0] * 32}), budget.used)


if __name__ == "__main__":
    main()
