"""Leases as objects with their own close(), used with `with`, closing() and by hand."""
from __future__ import annotations

import contextlib
from dataclasses import dataclass


class Budget:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def lease(self, n: int) -> Lease:
        self.used += n
        return Lease(self, n)

    def revoke(self, lease: Lease) -> None:
        if not lease.closed:
            lease.closed = True
            self.used -= lease.n


@dataclass(eq=False)
class Lease:
    budget: Budget
    n: int
    closed: bool = False

    def close(self) -> None:
        self.budget.revoke(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def prefill(budget: Budget, tokens: list[int]) -> int:
    with budget.lease(len(tokens)) as lease:  # clean: near miss, the lease is a context manager itself
        if not tokens:
            return 0
        return sum(tokens) * lease.n


def prefill_closing(budget: Budget, tokens: list[int]) -> int:
    lease = budget.lease(len(tokens))  # clean: near miss, closing() closes it
    with contextlib.closing(lease):
        if not tokens:
            return 0
        return sum(tokens)


def prefill_by_hand(budget: Budget, tokens: list[int]) -> int:
    lease = budget.lease(len(tokens))  # leak: no tokens, no close
    if not tokens:
        return 0
    total = sum(tokens)
    lease.close()
    return total


def prefill_later(budget: Budget, tokens: list[int]) -> int:
    lease = budget.lease(len(tokens))  # clean: near miss, entered after some work that can not leave
    total = 0
    for t in tokens:
        if t < 0:
            continue
        total += t
    with lease:
        return total


def prefill_stack(budget: Budget, groups: list[list[int]]) -> int:
    with contextlib.ExitStack() as stack:
        leases = [stack.enter_context(budget.lease(len(g))) for g in groups]  # clean: near miss, entered into the stack
        return sum(l.n for l in leases)


def prefill_groups(budget: Budget, groups: list[list[int]]) -> int:
    leases = []
    for g in groups:
        leases.append(budget.lease(len(g)))  # leak: closing stops at the first empty group
    total = sum(l.n for l in leases)
    for lease in leases:
        if lease.n == 0:
            break
        lease.close()
    return total


def reserve_only(budget: Budget, n: int) -> bool:
    return budget.lease(n).n > 0  # leak: temporary lease, nobody closes it


def upgrade(budget: Budget, lease: Lease, n: int) -> Lease:
    bigger = budget.lease(n)  # clean: near miss, returned, or revoked when it is not bigger
    if bigger.n <= lease.n:
        budget.revoke(bigger)
        return lease
    lease.close()
    return bigger
