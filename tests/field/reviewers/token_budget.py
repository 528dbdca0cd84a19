"""Token budgets for admission and chunked prefill."""
from __future__ import annotations

import random
import time
from dataclasses import dataclass


class TokenBudget:
    """A counter of tokens which may be in flight."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.remaining = capacity

    def try_take(self, n: int) -> bool:
        if n > self.remaining:
            return False
        self.remaining -= n  # clean: True tells the caller that it owns the tokens
        return True

    def take_up_to(self, n: int) -> int:
        """Take between 0 and n tokens and return how many."""
        got = min(n, self.remaining)
        self.remaining -= got  # clean: the amount is returned
        return got

    def take_aligned(self, n: int, align: int) -> int:
        got = min(n, self.remaining)
        self.remaining -= got  # leak: the tokens cut off by the alignment are never handed out nor restored
        return got - got % align

    def give_back(self, n: int) -> None:
        self.remaining = min(self.capacity, self.remaining + n)


@dataclass
class Prefill:
    rid: str
    length: int
    done: int = 0
    held: int = 0
    aborted: bool = False


class AdmissionQueue:
    def __init__(self, budget: TokenBudget, decode_budget: TokenBudget):
        self.budget = budget
        self.decode_budget = decode_budget
        self.live: dict[str, Prefill] = {}
        self.rejected: list[str] = []

    def admit(self, req: Prefill) -> bool:
        if req.rid in self.live:
            return True
        if not self.budget.try_take(req.length):  # clean: recorded in req.held and given back by retire()
            self.rejected.append(req.rid)
            return False
        req.held = req.length
        self.live[req.rid] = req
        return True

    def admit_with_decode(self, req: Prefill, max_new: int) -> bool:
        if req.rid in self.live:
            return True
        if not self.budget.try_take(req.length):  # leak: kept when the decode budget refuses
            return False
        if not self.decode_budget.try_take(max_new):  # leak: retire() only returns prefill tokens
            return False
        req.held = req.length
        self.live[req.rid] = req
        return True

    def admit_pair(self, a: Prefill, b: Prefill) -> bool:
        if a.rid == b.rid or a.rid in self.live or b.rid in self.live:
            return False
        if not self.budget.try_take(a.length):  # clean: near miss, given back when the second one is refused
            return False
        if not self.budget.try_take(b.length):  # clean: both are recorded and retired later
            self.budget.give_back(a.length)
            return False
        for r in (a, b):
            r.held = r.length
            self.live[r.rid] = r
        return True

    def admit_with_retry(self, req: Prefill, attempts: int) -> bool:
        if req.rid in self.live:
            return True
        for i in range(attempts):
            if self.budget.try_take(req.length):  # clean: near miss, the loop ends as soon as it succeeds
                req.held = req.length
                self.live[req.rid] = req
                return True
            time.sleep(random.random() * 0.01 * (i + 1))
        return False

    def chunk(self, req: Prefill, size: int) -> int:
        got = self.budget.take_up_to(size)  # clean: near miss, unused part given back, the rest added to held
        usable = min(got, req.length - req.done)
        if usable < got:
            self.budget.give_back(got - usable)
        req.held += usable
        req.done += usable
        return usable

    def chunk_all(self, reqs: list[Prefill], size: int) -> list[tuple[str, int]]:
        plan = []
        for req in reqs:
            got = self.budget.take_up_to(size)  # leak: aborted requests are skipped with the tokens taken
            if got == 0:
                break
            if req.aborted:
                continue
            req.held += got
            req.done += got
            plan.append((req.rid, got))
        return plan

    def retire(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        self.budget.give_back(req.held)
        req.held = 0

    def dry_run(self, sizes: list[int]) -> int:
        taken = 0
        fits = 0
        for s in sizes:
            if not self.budget.try_take(s):  # clean: near miss, the sum of all takes is given back after the loop
                break
            taken += s
            fits += 1
        self.budget.give_back(taken)
        return fits

    def measure(self, n: int) -> float:
        start = time.perf_counter()
        if self.budget.try_take(n):  # clean: given back in the same branch
            self.budget.give_back(n)
        return time.perf_counter() - start

    def ping(self, n: int, verbose: bool) -> str:
        if not self.budget.try_take(n):  # leak: the verbose return comes before the give_back
            return "full"
        if verbose:
            return f"ok, {self.budget.remaining} left"
        self.budget.give_back(n)
        return "ok"
