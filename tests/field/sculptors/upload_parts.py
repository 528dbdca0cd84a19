"""Multipart uploads. The ledger admits parts, the settler tells it which have ended."""
from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum

log = logging.getLogger("uploads")


class Outcome(Enum):
    STORED = "stored"
    REJECTED = "rejected"
    ABANDONED = "abandoned"


@dataclass(frozen=True)
class Part:
    number: int
    upload: str
    nbytes: int


class Ledger:
    """Bytes in flight. A part counts from open_part() until a settler settles its number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self._numbers = itertools.count(1)
        self._open: dict[int, Part] = {}

    def open_part(self, upload: str, nbytes: int) -> Part | None:
        if self.in_flight + nbytes > self.limit:
            return None
        part = Part(next(self._numbers), upload, nbytes)
        self._open[part.number] = part
        self.in_flight += nbytes
        return part

    def _strike(self, number: int) -> Part | None:
        part = self._open.pop(number, None)
        if part is not None:
            self.in_flight -= part.nbytes
        return part


class Settler:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.tally: dict[Outcome, int] = defaultdict(int)

    def settle(self, number: int, outcome: Outcome) -> None:
        part = self._ledger._strike(number)
        if part is None:
            log.warning("part %d settled twice", number)
            return
        self.tally[outcome] += 1


class Uploader:
    def __init__(self, ledger: Ledger, settler: Settler, store) -> None:
        self.ledger = ledger
        self.settler = settler
        self.store = store
        self.pending: dict[str, list[int]] = {}

    def put(self, upload: str, body: bytes) -> str | None:
        part = self.ledger.open_part(upload, len(body))  # clean: settled in both cases
        if part is None:
            return None
        etag = self.store.write(upload, part.number, body)
        self.settler.settle(part.number, Outcome.STORED if etag else Outcome.REJECTED)
        return etag

    def put_checked(self, upload: str, body: bytes, digest: str) -> str | None:
        part = self.ledger.open_part(upload, len(body))  # leak: a wrong digest returns without settling
        if part is None:
            return None
        if self.store.digest(body) != digest:
            log.info("%s: digest differs", upload)
            return None
        etag = self.store.write(upload, part.number, body)
        self.settler.settle(part.number, Outcome.STORED)
        return etag

    def put_verified(self, upload: str, body: bytes, digest: str) -> str | None:
        part = self.ledger.open_part(upload, len(body))  # clean: near miss, the wrong digest settles it too
        if part is None:
            return None
        if self.store.digest(body) != digest:
            self.settler.settle(part.number, Outcome.REJECTED)
            return None
        etag = self.store.write(upload, part.number, body)
        self.settler.settle(part.number, Outcome.STORED)
        return etag

    def put_all(self, upload: str, bodies: list[bytes]) -> int:
        numbers: list[int] = []
        for body in bodies:
            part = self.ledger.open_part(upload, len(body))  # leak: only the last number is settled
            if part is None:
                break
            self.store.write(upload, part.number, body)
            numbers.append(part.number)
        if numbers:
            self.settler.settle(numbers[-1], Outcome.STORED)
        return len(numbers)

    def put_each(self, upload: str, bodies: list[bytes]) -> int:
        numbers: list[int] = []
        for body in bodies:
            part = self.ledger.open_part(upload, len(body))  # clean: near miss, every number is settled below
            if part is None:
                break
            self.store.write(upload, part.number, body)
            numbers.append(part.number)
        for number in numbers:
            self.settler.settle(number, Outcome.STORED)
        return len(numbers)

    def announce(self, upload: str, nbytes: int) -> bool:
        part = self.ledger.open_part(upload, nbytes)  # clean: near miss, number kept, settled in finish/abort
        if part is None:
            return False
        self.pending.setdefault(upload, []).append(part.number)
        return True

    def finish(self, upload: str) -> int:
        numbers = self.pending.pop(upload, [])
        for number in numbers:
            self.settler.settle(number, Outcome.STORED)
        return len(numbers)

    def abort(self, upload: str) -> None:
        for number in self.pending.pop(upload, []):
            self.settler.settle(number, Outcome.ABANDONED)

    def probe(self, nbytes: int) -> bool:
        if self.ledger.open_part("probe", nbytes):  # leak: tested for truth, the part stays open
            return True
        return False
