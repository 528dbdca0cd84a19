"""The agent of a node: joins a round, runs the workers, joins the next one when the world changes."""
from __future__ import annotations

import logging
import threading
from typing import Callable, Optional

from .barrier import seat_in, seat_in_new
from .registry import Registry, Round, Seat

log = logging.getLogger("elastic")


class Agent:
    def __init__(self, registry: Registry, node: str) -> None:
        self.registry, self.node = registry, node
        self._round: Optional[Round] = None
        self._seat: Optional[Seat] = None

    def enter(self, size: int) -> Seat:
        pair = seat_in(self.registry, self.node)  # clean: near miss, leave() ends both
        if pair is None:
            pair = seat_in_new(self.registry, self.node, size)  # clean: near miss, leave() ends both
        self._round, self._seat = pair
        return self._seat

    def leave(self) -> None:
        if self._round is None:
            return
        self._round.part(self._seat)
        self.registry.close_round(self._round)
        self._round = self._seat = None

    def run(self, size: int, work: Callable[[Seat], bool]) -> int:
        rounds = 0
        again = True
        while again:
            seat = self.enter(size)  # clean: left at the end of the round
            again = work(seat)
            self.leave()
            rounds += 1
        return rounds


class StandbyAgent(Agent):
    """Waits with a reference on the round until a seat is free."""

    def __init__(self, registry: Registry, node: str) -> None:
        super().__init__(registry, node)
        self._watched: Optional[Round] = None
        self._wake = threading.Event()

    def watch(self) -> bool:
        latest = self.registry.lookup()  # clean: near miss, kept in _watched or closed as the same round
        if latest is None:
            return False
        if self._watched is not None:
            self.registry.close_round(self._watched)
        self._watched = latest
        return True

    def promote(self) -> bool:
        if self._watched is None:
            return False
        seat = self._watched.join(self.node)  # clean: near miss, kept in _seat, leave() parts it
        if seat is None:
            return False
        self._round, self._seat = self._watched, seat
        self._watched = None
        return True

    def leave(self) -> None:
        super().leave()
        if self._watched is not None:
            self.registry.close_round(self._watched)
            self._watched = None


class TrialAgent:
    """Takes a seat for a short trial of the node's links."""

    def __init__(self, registry: Registry, node: str) -> None:
        self.registry, self.node = registry, node

    def trial(self, check: Callable[[int], bool]) -> bool:
        pair = seat_in(self.registry, self.node)  # leak: the seat is parted, but the round's reference is not closed
        if pair is None:
            return False
        rnd, seat = pair
        ok = check(seat.rank)
        rnd.part(seat)
        return ok

    def snapshot(self, dump: Callable[[int], None]) -> None:
        latest = self.registry.freeze()  # clean: thawed in the finally
        try:
            dump(latest)
        finally:
            self.registry.thaw()

    def snapshot_if_changed(self, last: int, dump: Callable[[int], None]) -> int:
        latest = self.registry.freeze()  # leak: an unchanged registry stays frozen
        if latest == last:
            log.debug("nothing new since round %d", last)
            return last
        dump(latest)
        self.registry.thaw()
        return latest
