"""The ledger pass: every storage made is followed; after each window of steps as many must be alive as
before. Where C's heap does not move either, that is so without following them.

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

from .births import Birth, Births, Place
from .calm import stands_still
from .culprits import cycle_report, growth_report
from .stillness import held_still
from .watch import Watch, watching_threads

Step = Callable[[], object]


@dataclass(frozen=True)
class Level:
    """What is alive between two steps."""

    storages: int
    bytes: int
    alive: tuple[tuple[Birth, int], ...] = field(default=(), compare=False, repr=False)
    """Each storage's birth and bytes."""
    collected: int = field(default=0, compare=False)
    """Storages that only the cycle collector could free just now."""

    @property
    def storages_by_place(self) -> Counter[Place]:
        """How many of each kind."""
        return Counter(birth.place for birth, _ in self.alive)

    @property
    def bytes_by_place(self) -> Counter[Place]:
        """Bytes of each kind."""
        sizes: Counter[Place] = Counter()
        for birth, size in self.alive:
            sizes[birth.place] += size
        return sizes


@dataclass(frozen=True)
class Steady:
    """What a passed ledger saw: the level at rest, and how many windows it took to get there."""

    level: Level
    windows: int


def assert_no_growth(
    step: Step,
    *,
    warmup: int = 1,
    windows: int = 3,
    steps: int = 4,
    settle: int = 9,
    cycles: str = "fail",
    named: bool = True,
) -> Steady:
    """Run `step` again and again: live storages and bytes must be equal after each of `windows` windows.

    `warmup` steps come first. `settle` says how many windows may pass until the level rests: what fills once
    and is then kept is no leak. Raises `Leak`, or `CycleGarbage` if memory goes away only by the cycle
    collector (`cycles="allow"` accepts that). `named=False` spares the search for who holds the memory, for
    a twin whose leak is known.
    """
    ledger, placed = Ledger(), 1
    if settle and (level := ledger.calm(step, warmup, windows, steps)):
        return Steady(level, windows)
    with ledger:
        for _ in range(warmup):
            step()
        levels = [ledger.take_stock()]
        while len(levels) <= windows + settle and not _at_rest(levels, windows):
            levels.append(ledger.window(step, steps))
            if not ledger.births.placed and levels[-1] != levels[-2]:
                ledger.births.placed = True
                placed = len(levels)  # after the next window: what each step replaces has its place by then
        if not _at_rest(levels, windows) and _climbs(levels):
            while named and len(levels) <= placed + 1:
                levels.append(ledger.window(step, steps))
            raise growth_report(ledger.births, levels, steps, step, placed=placed, named=named)
        if cycles == "fail" and all(level.collected for level in levels[-windows:]):
            raise cycle_report(ledger.births, levels[-1].collected, steps, step)
    return Steady(levels[-1], len(levels) - 1)


@contextmanager
def nothing_stays() -> Iterator[None]:
    """A block at whose end no memory may be alive that was made inside it."""
    with Ledger() as ledger:
        before = ledger.take_stock()
        ledger.births.turn, ledger.births.placed = 1, True
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
        self.watch = Watch(self.births)
        self._exits = ExitStack()

    def calm(self, step: Step, warmup: int, windows: int, steps: int) -> Level | None:
        """What is alive after steps that moved nothing, and that nobody followed; None if something moved.
        Then threads that were started meanwhile are followed, too.
        """
        self.births.look_around()
        self.births.open = False
        with held_still(), watching_threads(lambda: Watch(self.births)):
            for _ in range(warmup):
                step()
            return stands_still(step, self.take_stock, windows=windows, steps=steps)

    def __enter__(self) -> Ledger:
        with ExitStack() as exits:
            self.births.look_around()
            self.births.open = True
            exits.enter_context(held_still())
            exits.callback(setattr, self.births, "open", False)
            exits.enter_context(watching_threads(lambda: Watch(self.births)))
            exits.enter_context(self.watch)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exits.close()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, operations are seen only where `watch` is entered again."""
        self.watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.watch.__enter__()  # type: ignore[no-untyped-call]

    def window(self, step: Step, steps: int) -> Level:
        """Run some steps, and count what is alive after them."""
        self.births.turn += 1
        for _ in range(steps):
            step()
        return self.take_stock()

    def take_stock(self) -> Level:
        """Collect, and count what is alive."""
        self.births.look_around()
        before = self.births.count_living()
        gc.collect()
        alive = self.births.living()
        sizes = tuple((birth, storage.nbytes()) for birth, storage in alive)
        return Level(len(sizes), sum(size for _, size in sizes), sizes, before - len(sizes))
