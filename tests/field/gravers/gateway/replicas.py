"""Replica table: every routed request holds a load ticket on its replica."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Replica:
    url: str
    capacity: int
    load: int = 0
    healthy: bool = True
    models: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class LoadTicket:
    replica: Replica
    cost: int


class ReplicaTable:
    def __init__(self, replicas: list[Replica]):
        self._replicas = replicas
        self._lock = threading.Lock()

    def book(self, model: str, cost: int) -> LoadTicket | None:
        with self._lock:
            fitting = [r for r in self._replicas if r.healthy and model in r.models]
            fitting = [r for r in fitting if r.load + cost <= r.capacity]
            if not fitting:
                return None
            best = min(fitting, key=lambda r: r.load / r.capacity)
            best.load += cost
            return LoadTicket(best, cost)

    def unbook(self, ticket: LoadTicket) -> None:
        with self._lock:
            ticket.replica.load -= ticket.cost

    def book_distinct(self, model: str, cost: int, avoid: str) -> LoadTicket | None:
        ticket = self.book(model, cost)  # leak: the replica to avoid turns into None with the load counted
        if ticket is None or ticket.replica.url == avoid:
            return None
        return ticket

    def book_any(self, models: list[str], cost: int) -> LoadTicket | None:
        for model in models:
            ticket = self.book(model, cost)  # clean: the caller's, the loop goes on with None only
            if ticket is not None:
                return ticket
        return None


class Booking:
    """`with Booking(table, model, cost) as ticket`; keep() moves the ticket to the caller."""

    def __init__(self, table: ReplicaTable, model: str, cost: int):
        self.table = table
        self.model = model
        self.cost = cost
        self.ticket: LoadTicket | None = None

    def __enter__(self) -> "Booking":
        self.ticket = self.table.book(self.model, self.cost)  # clean: __exit__ unbooks unless keep moved it
        return self

    def keep(self) -> LoadTicket | None:
        ticket, self.ticket = self.ticket, None
        return ticket

    def __exit__(self, *exc: object) -> None:
        if self.ticket is not None:
            self.table.unbook(self.ticket)
            self.ticket = None
