"""Rendezvous of the workers of one generation."""
from __future__ import annotations

import threading
from typing import Callable, Dict, List

from .slots import Grant, SlotLedger


class RendezvousClosed(RuntimeError):
    pass


class Rendezvous:
    def __init__(self, ledger: SlotLedger, min_workers: int) -> None:
        self.ledger = ledger
        self.min_workers = min_workers
        self.generation = 0
        self._members: Dict[str, Grant] = {}
        self._state = threading.Lock()
        self._closed = False

    def join(self, worker: str) -> bool:
        self._state.acquire()  # clean: released in the finally, whichever return is taken
        try:
            if self._closed:
                return False
            if worker in self._members:
                return True
            grant = self.ledger.claim(worker)  # clean: kept in the member table, leave() or reset() surrenders it
            if grant is None:
                return False
            self._members[worker] = grant
            return True
        finally:
            self._state.release()

    def leave(self, worker: str) -> None:
        with self._state:
            grant = self._members.pop(worker, None)
        if grant is not None:
            self.ledger.surrender(grant)

    def rejoin(self, worker: str) -> bool:
        """A restarted worker may come back before its old grant has gone."""
        grant = self.ledger.claim(worker)  # leak: the closed test comes after the claim and returns with it
        if grant is None:
            return False
        with self._state:
            if self._closed:
                return False
            old = self._members.get(worker)
            self._members[worker] = grant
        if old is not None:
            self.ledger.surrender(old)
        return True

    def ready(self) -> bool:
        self._state.acquire()  # leak: held on the early return of a closed rendezvous
        if self._closed:
            return False
        enough = len(self._members) >= self.min_workers
        self._state.release()
        return enough

    def next_generation(self) -> int:
        with self._state:
            self.generation += 1
            return self.generation

    def reset(self) -> List[str]:
        with self._state:
            members, self._members = self._members, {}
        for grant in members.values():
            self.ledger.surrender(grant)
        return list(members)

    def close(self) -> None:
        with self._state:
            self._closed = True
        self.reset()

    def with_spare(self, worker: str, fn: Callable[[Grant], bool]) -> bool:
        """Run fn on a spare slot; fn answers whether the spare becomes the worker's own."""
        spare = self.ledger.claim(worker)  # clean: near miss, adopted into the table or surrendered by the flag
        if spare is None:
            return False
        adopted = fn(spare)
        if adopted:
            with self._state:
                old = self._members.pop(worker, None)
                self._members[worker] = spare
            if old is not None:
                self.ledger.surrender(old)
        if not adopted:
            self.ledger.surrender(spare)
        return adopted
