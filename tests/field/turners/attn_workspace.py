"""Split-KV attention: partial outputs and planner metadata live in pooled scratch tensors."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

try:
    import torch
except ImportError:
    torch = None


class Scratch:
    __slots__ = ("numel", "data")

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.data = [0.0] * numel


class ScratchPool:
    """Size classes in powers of two; the total is capped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._classes: Dict[int, List[Scratch]] = {}

    def rent(self, numel: int) -> Optional[Scratch]:
        size = 1 << max(0, numel - 1).bit_length()
        if self.in_use + size > self.limit:
            return None
        self.in_use += size
        stack = self._classes.setdefault(size, [])
        return stack.pop() if stack else Scratch(size)

    def rent_many(self, sizes: Sequence[int]) -> Optional[List[Scratch]]:
        rented: List[Scratch] = []
        for numel in sizes:
            scratch = self.rent(numel)  # clean: near miss, the earlier ones are ended when one is refused, else returned
            if scratch is None:
                for earlier in rented:
                    self.end_rent(earlier)
                return None
            rented.append(scratch)
        return rented

    def rent_exact(self, numel: int) -> Optional[Scratch]:
        """Only when the size class has no slack."""
        scratch = self.rent(numel)  # leak: a class larger than asked for returns None and drops it
        if scratch is None or scratch.numel != numel:
            return None
        return scratch

    def end_rent(self, scratch: Scratch) -> None:
        self.in_use -= scratch.numel
        self._classes[scratch.numel].append(scratch)


@dataclass
class SplitPlan:
    num_splits: int
    partial: Scratch
    lse: Scratch


class AttentionPlanner:
    def __init__(self, pool: ScratchPool, split_size: int = 4) -> None:
        self.pool = pool
        self.split_size = split_size
        self.cached: Optional[SplitPlan] = None

    def _rent_or_raise(self, numel: int) -> Scratch:
        scratch = self.pool.rent(numel)  # clean: None raises, otherwise handed to the caller
        if scratch is None:
            raise MemoryError(f"workspace of {numel} exceeds the limit")
        return scratch

    def plan(self, seq_len: int) -> Optional[SplitPlan]:
        splits = -(-seq_len // self.split_size)
        try:
            partial = self._rent_or_raise(splits * 8)  # leak: the handled MemoryError of the second rent drops it
            lse = self._rent_or_raise(splits)  # clean: handed on in the plan
        except MemoryError:
            return None
        return SplitPlan(splits, partial, lse)

    def plan_or_shrink(self, seq_len: int) -> Optional[SplitPlan]:
        splits = -(-seq_len // self.split_size)
        while splits > 0:
            partial = self.pool.rent(splits * 8)  # clean: near miss, ended before the next smaller attempt
            if partial is not None:
                lse = self.pool.rent(splits)  # clean: handed on in the plan
                if lse is not None:
                    return SplitPlan(splits, partial, lse)
                self.pool.end_rent(partial)
            splits //= 2
        return None

    def end_plan(self, plan: SplitPlan) -> None:
        self.pool.end_rent(plan.partial)
        self.pool.end_rent(plan.lse)

    def decode(self, queries: Sequence[float], seq_len: int) -> List[float]:
        plan = self.plan(seq_len)  # leak: a single split takes the short way and does not end the plan
        if plan is None:
            return []
        if plan.num_splits == 1:
            return list(queries)
        out = [q / plan.num_splits for q in queries]
        self.end_plan(plan)
        return out

    def prefill(self, queries: Sequence[float], seq_len: int) -> List[float]:
        plan = self.plan_or_shrink(seq_len)  # clean: None-checked, ended in finally
        if plan is None:
            return []
        try:
            if not queries:
                return []
            return [q * plan.num_splits for q in queries]
        finally:
            self.end_plan(plan)

    def cached_plan(self, seq_len: int) -> Optional[SplitPlan]:
        if self.cached is None or self.cached.num_splits * self.split_size < seq_len:
            self.reset()
            self.cached = self.plan_or_shrink(seq_len)  # clean: near miss, reset ends the cached one before the overwrite
        return self.cached

    def reset(self) -> None:
        if self.cached is not None:
            self.end_plan(self.cached)
            self.cached = None

    def merge(self, parts: Sequence[Sequence[float]], combine: Callable[[Scratch], float]) -> float:
        total = 0.0
        for part in parts:
            scratch = self.pool.rent(len(part))  # clean: near miss, None is summed without scratch, otherwise ended in the same turn
            if scratch is None:
                total += sum(part)
                continue
            scratch.data[: len(part)] = part
            total += combine(scratch)
            self.pool.end_rent(scratch)
        return total

    def transpose(self, rows: Sequence[Sequence[float]]) -> List[List[float]]:
        scratch = self.pool.rent_many([len(row) for row in rows])  # clean: None-checked, every one is ended
        if scratch is None:
            return [list(col) for col in zip(*rows)]
        for buf, row in zip(scratch, rows):
            buf.data[: len(row)] = row
        out = [list(col) for col in zip(*(buf.data[: len(rows[0])] for buf in scratch))]
        for buf in scratch:
            self.pool.end_rent(buf)
        return out

    def merge_sorted(self, parts: Sequence[Sequence[float]]) -> List[float]:
        held: Dict[int, Scratch] = {}
        for part in parts:
            scratch = self.pool.rent(len(part))  # leak: two parts of one length share a key, the first entry is overwritten
            if scratch is None:
                break
            scratch.data[: len(part)] = part
            held[len(part)] = scratch
        out: List[float] = []
        for length in sorted(held):
            out.extend(held[length].data[:length])
        for scratch in held.values():
            self.pool.end_rent(scratch)
        return out


if __name__ == "__main__":
    planner = AttentionPlanner(ScratchPool(128))
    assert planner.prefill([1.0], 8) == [2.0]
    assert planner.cached_plan(8) is planner.cached_plan(8)
    planner.cached_plan(12)
    planner.reset()
    assert planner.merge([[1.0, 2.0], [3.0]], lambda s: sum(s.data)) == 6.0
    assert planner.transpose([[1.0, 2.0], [3.0, 4.0]]) == [[1.0, 3.0], [2.0, 4.0]]
    assert planner.pool.in_use == 0
