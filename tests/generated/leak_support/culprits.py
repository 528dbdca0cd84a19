# poolaudit leaktests, sha256 e8509a151ac8d074: written again as long as that is the digest of the rest
"""Names what grew: per place of birth how much a step, by which operation, from whose line, held by whom."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .births import Births, Place, readable
from .errors import Culprit, CycleGarbage, Leak
from .garbage import unreachable
from .referrers import cycle_of, holders
from .unseen import where_grown, where_unseen

if TYPE_CHECKING:
    from .ledger import Level

MOST_NAMED = 5
STACK_SHOWN = 4


def growth_report(
    births: Births,
    levels: Sequence[Level],
    steps: int,
    step: Callable[[], object] | None = None,
    *,
    placed: int = 0,
    named: bool = True,
) -> Leak:
    """The failure of a ledger whose level did not come to rest. From the level with number `placed` on it is
    known where storages were made. With `step`, one more tells where memory was made that no operation
    showed. Unless `named` it says no more than how much.
    """
    run = (len(levels) - 1) * steps
    first, last = levels[0], levels[-1]
    head = (
        f"memory grows by {amount((last.bytes - first.bytes) / run)} and "
        f"{count((last.storages - first.storages) / run)} a step ({run} steps after the warm-up; "
        f"live bytes after each window of {steps}: {', '.join(str(level.bytes) for level in levels)})"
    )
    if not named:
        return Leak(head)
    first, run = levels[placed], (len(levels) - 1 - placed) * steps
    storages = last.storages_by_place - first.storages_by_place
    sizes = last.bytes_by_place - first.bytes_by_place
    gc.unfreeze()  # who holds it may be older than the pass
    culprits = []
    for place in sorted(storages | sizes, key=lambda place: -sizes[place])[:MOST_NAMED]:
        newest = _newest(births, place)
        if newest is not None:
            culprits.append(_culprit(place, storages[place] / run, sizes[place] / run, holders(newest)))
    if step is not None:
        culprits = [culprit if culprit.stack else _placed(culprit, births, step) for culprit in culprits]
    return Leak(_told(head, culprits), tuple(culprits))


def cycle_report(births: Births, storages: int, steps: int, step: Callable[[], object]) -> CycleGarbage:
    """The failure of a ledger at rest whose garbage only the cycle collector frees: one more step shows
    it.
    """
    births.turn, births.placed = births.turn + 1, True
    step()
    before = {birth.place for birth, _ in births.living() if birth.turn == births.turn}
    garbage = unreachable()
    culprits = []
    for place in before:
        newest = _newest(births, place)
        path = cycle_of(newest, garbage) if newest is not None else ()
        if newest is not None and path:
            culprits.append(_culprit(place, 1, newest.nbytes(), path))
    culprits.sort(key=lambda culprit: -culprit.bytes_a_step)
    head = f"{count(storages / steps)} a step are freed by the cycle collector alone: until it runs they stay"
    return CycleGarbage(_told(head, culprits[:MOST_NAMED]), tuple(culprits[:MOST_NAMED]))


def _placed(culprit: Culprit, births: Births, step: Callable[[], object]) -> Culprit:
    """With the line that made what no operation showed, or that made larger what is older than the pass."""
    stack = where_unseen(births, step)
    if not stack and not culprit.storages_a_step:
        stack = where_grown(births, step)
    return replace(culprit, line=stack[0], stack=stack) if stack else culprit


def fault_head(faults: int, before: Level, after: Level) -> str:
    """How much injected faults left behind."""
    return (
        f"after {faults} injected faults {amount(after.bytes - before.bytes)} in "
        f"{count(after.storages - before.storages)} stay held"
    )


def fault_report(head: str, births: Births, before: Level, after: Level, names: Mapping[int, str]) -> Leak:
    """The failure of a fault pass; `names` says by number in which operation's place each fault was. What
    was left by a fault and replaced by the next did not grow: then it is what faults made and is alive.
    """
    storages = after.storages_by_place - before.storages_by_place
    sizes = after.bytes_by_place - before.bytes_by_place
    living, culprits, faults = births.living(), [], set()
    if not storages and not sizes:
        for birth, storage in living:
            if birth.turn in names:
                storages[birth.place] += 1
                sizes[birth.place] += storage.nbytes()
    gc.unfreeze()
    for place in sorted(storages | sizes, key=lambda place: -sizes[place])[:MOST_NAMED]:
        stayed = [(birth.turn, storage) for birth, storage in living if birth.place == place]
        faults |= {turn for turn, _ in stayed if turn in names}
        if stayed:
            culprits.append(_culprit(place, storages[place], sizes[place], holders(stayed[-1][1])))
    if faults:
        listed = ", ".join(f"{turn} ({names[turn]})" for turn in sorted(faults)[:MOST_NAMED])
        head += f"; first of all after fault {listed}"
    return Leak(_told(head, culprits, each=""), tuple(culprits))


def _newest(births: Births, place: Place) -> torch.UntypedStorage | None:
    found = [storage for birth, storage in births.living() if birth.place == place]
    return found[-1] if found else None


def _culprit(place: Place, storages: float, size: float, held_by: tuple[str, ...]) -> Culprit:
    operation, frames = place
    stack = readable(frames)
    return Culprit(operation, storages, size, stack[0] if stack else "an unknown line", tuple(stack), held_by)


def _told(head: str, culprits: Sequence[Culprit], *, each: str = " a step") -> str:
    lines = [head]
    for culprit in culprits:
        grown = f"{amount(culprit.bytes_a_step)}, {count(culprit.storages_a_step)}{each}"
        lines.append(f"  {grown}: made by {culprit.operation}")
        for number, place in enumerate(culprit.stack[:STACK_SHOWN]):
            source = source_of(place) if number == 0 else ""
            lines.append(f"    {'called from' if number else 'born at'} {place}{source}")
        lines += [f"    held by {holder}" for holder in culprit.held_by]
    return "\n".join(lines)


def source_of(place: str) -> str:
    """The text of a `path:line in function`, set off to be put behind it."""
    path, _, rest = place.rpartition(":")
    line = linecache.getline(path, int(rest.split()[0])).strip() if rest.split()[:1] else ""
    return f":  {line}" if line else ""


def amount(size: float) -> str:
    """Bytes, as exact as they are."""
    return f"{size:,.0f} bytes" if size == int(size) else f"{size:,.2f} bytes"


def count(number: float) -> str:
    """A number of storages, as exact as it is."""
    words = f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"
    return f"{words} storage{'' if number == 1 else 's'}"
