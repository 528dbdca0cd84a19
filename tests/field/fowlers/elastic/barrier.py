"""Barriers over a round: tickets count the arrivals."""
from __future__ import annotations

import time
from typing import Callable, Optional, Sequence

from .registry import Registry, Round, Seat


class TicketGate:
    """Hands out a limited number of tickets; the gate falls when all are out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._out: set[int] = set()

    def draw(self) -> int:
        """A ticket's number, 0 when there are no more."""
        if len(self._out) == self._limit:
            return 0
        number = max(self._out, default=0) + 1
        self._out.add(number)
        return number

    def hand_in(self, number: int) -> None:
        self._out.discard(number)

    def fallen(self) -> bool:
        return len(self._out) == self._limit


def pass_all(gates: Sequence[TicketGate], patience: float) -> int:
    """Draws from each gate in turn; gives up at the first without a ticket."""
    passed = 0
    for gate in gates:
        ticket = gate.draw()  # leak: a gate that doesn't fall in time ends the loop with its ticket
        if not ticket:
            break
        deadline = time.monotonic() + patience
        while not gate.fallen() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not gate.fallen():
            break
        gate.hand_in(ticket)
        passed += 1
    return passed


def hold_all(gates: Sequence[TicketGate], body: Callable[[], None]) -> bool:
    held: list[tuple[TicketGate, int]] = []
    try:
        for gate in gates:
            ticket = gate.draw()  # clean: near miss, 0 is no ticket, the others are handed in below
            if not ticket:
                return False
            held.append((gate, ticket))
        body()
        return True
    finally:
        for gate, ticket in reversed(held):
            gate.hand_in(ticket)


def seat_in(registry: Registry, node: str) -> Optional[tuple[Round, Seat]]:
    """A seat in the latest round. The caller parts and closes the round."""
    rnd = registry.lookup()  # leak: a full round is given up for None with its reference
    if rnd is None:
        return None
    seat = rnd.join(node)  # clean: handed on in the pair
    if seat is None:
        return None
    return rnd, seat


def seat_in_new(registry: Registry, node: str, size: int) -> tuple[Round, Seat]:
    rnd = registry.open_round(size)  # clean: handed on in the pair
    seat = rnd.join(node)  # clean: handed on in the pair
    return rnd, seat
