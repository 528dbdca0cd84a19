"""The gate puts a global and a tenant's budget together into one ticket."""
from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

from .budget import Budget, BudgetBook, Permit


@dataclass
class Ticket:
    tenant: str
    permits: list[Permit] = field(default_factory=list)
    issued: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        while self.permits:
            self.permits.pop().refund()


class Gate:
    def __init__(self, total: int, per_tenant: int) -> None:
        self.whole = Budget("*", total)
        self.book = BudgetBook(per_tenant)
        self.refused = 0

    def enter(self, tenant: str, cost: int) -> Ticket | None:
        whole = self.whole.take(cost)  # clean: refunded when the tenant is over its limit
        if whole is None:
            self.refused += 1
            return None
        own = self.book.of(tenant).take(cost)  # clean: goes into the ticket
        if own is None:
            self.refused += 1
            whole.refund()
            return None
        return Ticket(tenant, [whole, own])

    def enter_many(self, costs: dict[str, int]) -> Ticket | None:
        """A fan-out request pays for each tenant it touches; all or nothing."""
        ticket = Ticket("fanout")
        for tenant, cost in sorted(costs.items()):
            permit = self.book.of(tenant).take(cost)  # leak: earlier permits of the ticket are not refunded
            if permit is None:
                self.refused += 1
                return None
            ticket.permits.append(permit)
        return ticket

    def enter_group(self, tenants: list[str]) -> Ticket | None:
        ticket = Ticket("group")
        for tenant in tenants:
            permit = self.book.of(tenant).take()  # clean: near miss, the ticket's close gives the others back
            if permit is None:
                ticket.close()
                return None
            ticket.permits.append(permit)
        return ticket

    def upgrade(self, ticket: Ticket, extra: int) -> bool:
        """A request which turns out to be larger pays more, in both budgets."""
        whole = self.whole.take(extra)  # leak: not refunded when the tenant's budget refuses
        if whole is None:
            return False
        own = self.book.of(ticket.tenant).take(extra)  # clean: moves into the ticket
        if own is None:
            return False
        ticket.permits += [whole, own]
        return True

    @contextlib.contextmanager
    def admitted(self, tenant: str, cost: int = 1):
        ticket = self.enter(tenant, cost)  # clean: closed after the body
        try:
            yield ticket is not None
        finally:
            if ticket is not None:
                ticket.close()

    def bypass(self, tenant: str) -> Permit | None:
        """Health checks pay the whole, not the tenant."""
        if tenant.startswith("internal-"):
            return self.whole.take()  # clean: handed on
        return None
