# poolaudit leaktests, sha256 802db0f3732b5393: written again as long as that is the digest of the rest
"""What a leak test fails with: an AssertionError whose attributes say in data what its message says in
words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Culprit:
    """Memory that grew: how much a step, which operation made it, whose line asked for it, and who holds
    it.
    """

    operation: str
    storages_a_step: float
    bytes_a_step: float
    line: str
    """`path:line in function` of the innermost frame that is not torch's."""
    stack: tuple[str, ...]
    held_by: tuple[str, ...]
    """From the memory outwards to a module, a frame or a global; empty where only C++ holds it."""


class Leak(AssertionError):
    """Memory, a lease or an object that stayed when the step was over."""

    def __init__(self, message: str, culprits: tuple[Culprit, ...] = ()) -> None:
        super().__init__(message)
        self.culprits = culprits


class CycleGarbage(Leak):
    """Memory that went away only because the cycle collector ran: it stays until that happens to run
    again.
    """


class Mismatch(AssertionError):
    """With the pool something came out that differs from what came out without."""


class InjectedFault(RuntimeError):
    """What a fault pass raises in the place of an operation or an acquire."""
