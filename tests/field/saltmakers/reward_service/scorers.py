"""A scorer runs one reward model on a leased device."""
from __future__ import annotations

from typing import List, Optional, Sequence

from .devices import FairBook, Lease


class Scorer:
    """Opened on a lease of its own, or on one that its caller shares with it."""

    def __init__(self, name: str, mb: int, load, book: FairBook):
        self.name = name
        self.mb = mb
        self.load = load
        self.book = book
        self.lease: Optional[Lease] = None
        self.shared = False
        self.model = None

    def open(self, lease: Optional[Lease] = None) -> bool:
        if self.lease is not None:
            return True
        self.shared = lease is not None
        if not self.shared:
            lease = self.book.sign_out(self.mb, self.name)  # clean: near miss, close() signs it in unless it is shared
        if lease is None:
            return False
        self.lease = lease
        self.model = self.load(self.name, lease.device)
        return True

    def score(self, prompts: Sequence[str], answers: Sequence[str]) -> List[float]:
        return [float(self.model(p, a)) for p, a in zip(prompts, answers)]

    def close(self) -> None:
        self.model = None
        if self.lease is not None and not self.shared:
            self.book.sign_in(self.lease)
        self.lease = None

    def __enter__(self) -> "Scorer":
        if self.lease is None and not self.open():  # clean: closed in __exit__
            raise MemoryError(self.name)
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class EnsembleScorer:
    """All members on one lease."""

    def __init__(self, members: List[Scorer], book: FairBook):
        self.members = members
        self.book = book
        self.lease: Optional[Lease] = None

    def open(self) -> bool:
        total = sum(m.mb for m in self.members)
        lease = self.book.sign_out(total, "ensemble")  # leak: a member that does not load returns False before self.lease is set
        if lease is None:
            return False
        for m in self.members:
            m.open(lease)
            if m.model is None:
                return False
        self.lease = lease
        return True

    def score(self, prompts: Sequence[str], answers: Sequence[str]) -> List[float]:
        rows = [m.score(prompts, answers) for m in self.members]
        return [sum(col) / len(col) for col in zip(*rows)]

    def close(self) -> None:
        for m in self.members:
            m.close()
        if self.lease is not None:
            self.book.sign_in(self.lease)
            self.lease = None


def quick_score(name: str, mb: int, load, book: FairBook, pairs) -> Optional[List[float]]:
    with book.signed_out(mb, name) as lease:  # clean: with statement
        model = load(name, lease.device)
        if model is None:
            return None
        return [float(model(p, a)) for p, a in pairs]
