"""Token dispatch and combine for expert parallel MoE layers over a slab of capacity rows."""
from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence

log = logging.getLogger("moe")


@dataclass(frozen=True)
class Rows:
    start: int
    count: int


class CapacitySlab:
    """First-fit reservation of row ranges in the symmetric all-to-all slab."""

    def __init__(self, rows: int) -> None:
        self.total = rows
        self._taken: Dict[int, Rows] = {}

    def reserve(self, count: int) -> Optional[Rows]:
        count = max(count, 1)
        cursor = 0
        for start in sorted(self._taken):
            if start - cursor >= count:
                break
            cursor = start + self._taken[start].count
        if cursor + count > self.total:
            return None
        rows = Rows(cursor, count)
        self._taken[cursor] = rows
        return rows

    def unreserve(self, rows: Rows) -> None:
        self._taken.pop(rows.start)

    @contextlib.contextmanager
    def scratch(self, count: int) -> Iterator[Rows]:
        rows = self.reserve(count)  # clean: given back in finally
        if rows is None:
            raise MemoryError("slab full")
        try:
            yield rows
        finally:
            self.unreserve(rows)

    def reserve_with_evict(self, count: int, victims: List[Rows]) -> Optional[Rows]:
        rows = self.reserve(count)  # clean: handed to the caller
        while rows is None and victims:
            self.unreserve(victims.pop())
            rows = self.reserve(count)  # clean: near miss, rebinding only while rows is None
        return rows


class Router:
    def __init__(self, experts: int, topk: int) -> None:
        self.experts, self.topk = experts, topk

    def route(self, tokens: Sequence[int]) -> Dict[int, List[int]]:
        table: Dict[int, List[int]] = {}
        for t in tokens:
            for k in range(self.topk):
                table.setdefault((t + k) % self.experts, []).append(t)
        return table


@dataclass
class DispatchPlan:
    per_expert: Dict[int, Rows]
    dropped: int = 0
    combined: Optional[Rows] = None


class Dispatcher:
    def __init__(self, slab: CapacitySlab, router: Router, capacity: int) -> None:
        self.slab = slab
        self.router = router
        self.capacity = capacity

    def plan(self, tokens: Sequence[int]) -> Optional[DispatchPlan]:
        per_expert: Dict[int, Rows] = {}
        for expert, toks in self.router.route(tokens).items():
            rows = self.slab.reserve(min(len(toks), self.capacity))  # leak: earlier experts' rows are lost when one does not fit
            if rows is None:
                log.warning("expert %d does not fit", expert)
                return None
            per_expert[expert] = rows
        return DispatchPlan(per_expert)

    def plan_all_or_nothing(self, tokens: Sequence[int]) -> Optional[DispatchPlan]:
        per_expert: Dict[int, Rows] = {}
        for expert, toks in self.router.route(tokens).items():
            rows = self.slab.reserve(min(len(toks), self.capacity))  # clean: rolled back on failure, else moved into the plan
            if rows is None:
                for held in per_expert.values():
                    self.slab.unreserve(held)
                return None
            per_expert[expert] = rows
        return DispatchPlan(per_expert)

    def finish(self, plan: DispatchPlan) -> None:
        for rows in plan.per_expert.values():
            self.slab.unreserve(rows)
        plan.per_expert.clear()
        if plan.combined is not None:
            self.slab.unreserve(plan.combined)
            plan.combined = None

    def forward(self, tokens: Sequence[int]) -> int:
        plan = self.plan_all_or_nothing(tokens)  # clean: finish in finally
        if plan is None:
            return 0
        try:
            plan.combined = self.slab.reserve(len(tokens))  # clean: finish gives the combined rows back
            if plan.combined is None:
                return -1
            return sum(r.count for r in plan.per_expert.values())
        finally:
            self.finish(plan)

    def forward_no_drop(self, tokens: Sequence[int]) -> int:
        plan = self.plan_all_or_nothing(tokens)  # leak: early return when combined does not fit skips finish
        if plan is None:
            return 0
        combined = self.slab.reserve(len(tokens))  # clean: moved into the plan, finish gives it back
        if combined is None:
            return -1
        plan.combined = combined
        n = sum(r.count for r in plan.per_expert.values())
        self.finish(plan)
        return n

    def grow(self, plan: DispatchPlan, expert: int, count: int) -> bool:
        bigger = self.slab.reserve(count)  # clean: near miss, the old rows are given back before the entry is overwritten
        if bigger is None:
            return False
        old = plan.per_expert.get(expert)
        if old is not None:
            self.slab.unreserve(old)
        plan.per_expert[expert] = bigger
        return True

    def replace_combined(self, plan: DispatchPlan, count: int) -> None:
        plan.combined = self.slab.reserve(count)  # leak: overwrites combined rows set by an earlier call


def shuffle_rows(slab: CapacitySlab, sizes: Sequence[int]) -> int:
    moved = 0
    rows = None
    for size in sizes:
        rows = slab.reserve(size)  # leak: rebound each round, only the last is given back
        if rows is None:
            break
        moved += rows.count
    if rows is not None:
        slab.unreserve(rows)
    return moved


def probe_capacity(slab: CapacitySlab, want: int) -> int:
    """Largest power-of-two fraction of want that fits right now."""
    while want > 0:
        rows = slab.reserve(want)  # clean: given back at once when it fits
        if rows is not None:
            slab.unreserve(rows)
            return want
        want //= 2
    return 0


def can_fit(slab: CapacitySlab, want: int) -> bool:
    return slab.reserve(want) is not None  # leak: the reservation is tested and dropped


def local_experts(slab: CapacitySlab, counts: Dict[int, int]) -> int:
    total = 0
    with slab.scratch(4) as head:  # clean: with
        for expert, n in counts.items():
            with slab.scratch(n) as rows:  # clean: near miss, continue inside a with
                if n == 0:
                    continue
                total += rows.count + head.start
    return total


def shared_expert(slab: CapacitySlab, n: int, victims: List[Rows]) -> int:
    rows = slab.reserve_with_evict(n, victims)  # leak: not given back when the count is odd
    if rows is None:
        return 0
    if rows.count % 2 == 0:
        slab.unreserve(rows)
        return n
    return n - 1


if __name__ == "__main__":
    slab = CapacitySlab(256)
    d = Dispatcher(slab, Router(4, 2), 16)
    assert d.forward(list(range(10))) > 0
    probe_capacity(slab, 512)
    local_experts(slab, {0: 2, 1: 0})
    assert not slab._taken
