from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class Ticket:
    number: int
    weight: int


class Admission:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._counter = 0

    def try_admit(self, weight: int) -> Ticket | None:
        if self.in_use + weight > self.capacity:
            return None
        self.in_use += weight
        self._counter += 1
        return Ticket(self._counter, weight)

    async def admit(self, weight: int, patience: float) -> Ticket | None:
        waited = 0.0
        while (ticket := self.try_admit(weight)) is None:  # clean: near miss, the loop ends with the ticket that is returned
            if waited >= patience:
                return None
            await asyncio.sleep(0.01)
            waited += 0.01
        return ticket

    def dismiss(self, ticket: Ticket) -> None:
        self.in_use -= ticket.weight
