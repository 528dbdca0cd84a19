"""Leases: who holds what, told by the identity of the tensor that was handed out.

A lease is a weak reference to its tensor. When the tensor dies unreleased the reference puts itself into a
queue (no lock, any thread, inside the collector too) and the table counts it as abandoned; an id is looked up
only after that queue was emptied, so a new tensor at the same address is never taken for a dead one.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from reference_modules.pool.blocks import Signal

MANY_SITES = 1024
"""Call sites kept apart for abandoned leases; more are counted together."""
ELSEWHERE = "other places"


class Lease(weakref.ref[torch.Tensor]):
    """One allocation in plain memory: the tensor (weakly) and its bytes."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int
    signal: Signal | None = None
    """The signal of its storage, where a block lies under it."""
    site: str | None = None
    """Where it was made, in tracking mode."""


class DetailedLease(Lease):
    """A lease with a block under it or a place to name; apart, because the plain one is made a hundred
    thousand times.
    """

    __slots__ = ("signal", "site")


class LeaseTable:
    """Every lease that had no deallocate, and the released ones whose tensor still lives."""

    __slots__ = ("abandoned_sites", "bury_later", "died", "released", "standing")

    def __init__(self) -> None:
        self.died: deque[Lease] = deque()
        self.bury_later = self.died.append
        self.standing: dict[int, Lease] = {}
        self.released: dict[int, tuple[Lease, str | None]] = {}
        """By id, with the place of the release: kept to tell a second release from a foreign tensor."""
        self.abandoned_sites: Counter[str] = Counter()

    def bury(self) -> list[Lease]:
        """The standing leases whose tensor has died since the last call; they leave the table."""
        lost = []
        while self.died:
            lease = self.died.popleft()
            if self.standing.get(lease.key) is lease:
                del self.standing[lease.key]
                lost.append(lease)
            elif lease.key in self.released and self.released[lease.key][0] is lease:
                del self.released[lease.key]
        return lost

    def remember_abandoned(self, lease: Lease) -> None:
        """Keep the place of a lease that nobody can release any more, in bounded space."""
        site = lease.site or "an unknown place (tracking=True names it)"
        known = site in self.abandoned_sites or len(self.abandoned_sites) < MANY_SITES
        self.abandoned_sites[site if known else ELSEWHERE] += 1


def call_site() -> str:
    """File and line of the code that uses the pool: the first frame outside the pool, the mixin and
    contextlib.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_plumbing(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_plumbing(module: str) -> bool:
    return module.startswith("reference_modules.pool") or module in ("reference_modules.mixin", "contextlib")
