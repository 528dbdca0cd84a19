"""Whether C's heap stands still while steps run: where less has moved than the smallest storage takes, none
can have stayed, and nobody has to look on.

The dispatcher's mode doubles what a step costs, and most modules leave not a byte. Every storage, on any
device and however little it holds, is an object of C++ on that heap; so is every tensor and every node of a
graph. Where the heap moves, for whatever reason, the ledger follows each storage as if nobody had asked
here.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from .garbage import free_harmless
from .heap import heap_bytes
from .scenarios import Step

SMALLEST_STORAGE = 96
"""Bytes of the heap that torch's object for an empty storage takes at least."""
ROUNDING = SMALLEST_STORAGE // 2
"""Chunks are handed out a little larger than was asked for, now and then. So much may come and go: what is
left of a storage, even where as much has gone, is more.
"""
PATIENCE = 1
"""How often the heap may move before it is left to the ledger."""
READINGS, PAUSE = 40, 0.0005
"""How often it is read, and how many seconds apart, until it counts as moved."""


class Stock(Protocol):
    """What is alive, as far as Python's objects tell."""

    @property
    def collected(self) -> int:
        """How much of it only the cycle collector could free."""


StockT = TypeVar("StockT", bound=Stock)


def stands_still(
    step: Callable[[], object], take_stock: Callable[[], StockT], *, windows: int, steps: int
) -> StockT | None:
    """What is alive after so many windows in a row that left the heap as it was; None if there were none.

    The stock before and after them must be the same too: it tells of storages that became larger in place.
    """
    if not _sees_storages():
        return None
    for _ in range(1 + PATIENCE):
        before = take_stock()
        if _stood_still(step, windows, steps):
            after = take_stock()
            return after if after == before and not after.collected else None
        if gc.collect():
            break  # garbage in cycles moves it in every window
    return None


def _stood_still(step: Callable[[], object], windows: int, steps: int) -> bool:
    _forget_gradients(step)
    start = _at_rest()
    for _ in range(windows):
        for _ in range(steps):
            step()
        _forget_gradients(step)
        if not _is_at(start):
            free_harmless()
        if not _is_back_at(start):
            return False
    return True


def _forget_gradients(step: Callable[[], object]) -> None:
    """They are made anew in each step, in chunks that are now a little larger and now a little smaller."""
    if isinstance(step, Step):
        step.forget_gradients()


def _at_rest() -> int:
    """How large the heap is. A thread that Python has joined may still be about to end, and give back what
    was its own.
    """
    for _ in range(READINGS):
        before = heap_bytes()
        time.sleep(PAUSE)
        if (now := heap_bytes()) == before:
            break
    return now


def _is_back_at(start: int) -> bool:
    """Whether the heap is as large as it was, as soon as threads have ended."""
    for _ in range(READINGS):
        if _is_at(start):
            return True
        time.sleep(PAUSE)
    return False


def _is_at(start: int) -> bool:
    return abs(heap_bytes() - start) <= ROUNDING


def _sees_storages() -> bool:
    """Whether the heap says at once what a storage takes and gives back: not where another malloc is in
    use, nor where this one keeps freed chunks ready (`GLIBC_TUNABLES=glibc.malloc.tcache_count=0` forbids
    that).
    """
    for _ in range(2):  # what asking itself takes is there at the second time
        before = heap_bytes()
        storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        taken = heap_bytes() - before
        del storage
        left = heap_bytes() - before
    return taken >= SMALLEST_STORAGE and not left
