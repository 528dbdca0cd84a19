"""The ledger pass: every storage made is followed; after each window of steps as many must be alive as
before.

No tolerance and no second try: a level that neither comes to rest (a cache that fills does, within `settle`
windows) nor comes back (a buffer that is emptied every few steps does) is a failure, be it by one byte.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from .births import Births, Place, Watch, watching_threads
from .culprits import cycle_report, growth_report
from .stillness import held_still

Step = Callable[[], object]


@dataclass(frozen=True)
class Level:
    """What is alive between two steps."""

    storages: int
    bytes: int
    storages_by_place: Counter[Place] = field(default_factory=Counter, compare=False, repr=False)
    bytes_by_place: Counter[Place] = field(default_factory=Counter, compare=False, repr=False)


@dataclass(frozen=True)
class Steady:
    """What a passed ledger saw: the level at rest, and how many windows it took to get there."""

    level: Level
    windows: int


def assert_no_growth(
    step: Step, *, warmup: int = 3, windows: int = 3, steps: int = 4, settle: int = 9, cycles: str = "fail"
) -> Steady:
    """Run `step` again and again: live storages and bytes must be equal after each of `windows` windows.

    `warmup` steps come first. `settle` says how many windows may pass until the level rests: what fills once
    and is then kept is no leak. Raises `Leak`, or `CycleGarbage` if memory goes away only by the cycle
    collector (`cycles="allow"` accepts that).
    """
    ledger = Ledger()
    with ledger:
        for _ in range(warmup):
            step()
        ledger.take_stock()
        levels, collected = [ledger.take_stock()], [0]
        while len(levels) <= windows + settle and not _at_rest(levels, windows):
            collected.append(ledger.window(step, steps))
            levels.append(ledger.take_stock())
        if not _at_rest(levels, windows) and _climbs(levels):
            raise growth_report(ledger.births, levels, steps, step)
        if cycles == "fail" and all(collected[-windows:]):
            raise cycle_report(ledger.births, collected[-1], steps, step)
    return Steady(levels[-1], len(levels) - 1)


@contextmanager
def nothing_stays() -> Iterator[None]:
    """A block at whose end no memory may be alive that was made inside it."""
    with Ledger() as ledger:
        before = ledger.take_stock()
        ledger.births.turn = 1
        yield
        after = ledger.take_stock()
        if after.storages > before.storages or after.bytes > before.bytes:
            raise growth_report(ledger.births, [before, after], 1)


def _at_rest(levels: list[Level], windows: int) -> bool:
    return len(levels) > windows and len(set(levels[-windows - 1 :])) == 1


def _climbs(levels: list[Level]) -> bool:
    """Whether the level only goes up. A buffer that is emptied every few steps never rests, but comes back:
    its lowest and its highest level are the same in both halves of the run.
    """
    half = (len(levels) + 1) // 2
    for read in (attrgetter("storages"), attrgetter("bytes")):
        first, last = [*map(read, levels[:half])], [*map(read, levels[half:])]
        if min(last) > min(first) and max(last) > max(first):
            return True
    return False


class Ledger:
    """Entered, it follows all storages that are made in this thread and in those started from it."""

    def __init__(self) -> None:
        self.births = Births()
        self._exits = ExitStack()

    def __enter__(self) -> Ledger:
        with ExitStack() as exits:
            self.births.look_around(known_before=True)
            exits.enter_context(held_still())
            exits.callback(setattr, self.births, "open", False)
            exits.enter_context(watching_threads(lambda: Watch(self.births)))
            exits.enter_context(Watch(self.births))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exits.close()

    def window(self, step: Step, steps: int) -> int:
        """Run some steps and collect; returns how many storages only the collector could free."""
        self.births.turn += 1
        for _ in range(steps):
            step()
        self.births.look_around()
        before = len(self.births.living())
        gc.collect()
        return before - len(self.births.living())

    def take_stock(self) -> Level:
        """Collect, and count what is alive."""
        gc.collect()
        self.births.look_around()
        alive = self.births.living()
        level = Level(len(alive), sum(storage.nbytes() for _, storage in alive))
        for birth, storage in alive:
            level.storages_by_place[birth.place] += 1
            level.bytes_by_place[birth.place] += storage.nbytes()
        return level
