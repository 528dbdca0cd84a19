# poolaudit leaktests, sha256 4c8b656f69a4a728: written again as long as that is the digest of the rest
"""The quiet pass: nothing looks on while the steps run; afterwards the counters of the process are read.

It sees what is no tensor: Python objects, nodes of autograd, memory of C libraries, the device's allocator.
Unlike storages these counters move by themselves for a while (free lists fill, heaps settle), so what is
asked is whether a window still takes as much as the least that each of its steps could leak: one block, or
one chunk of C's heap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from .blame import blame_blocks, blame_heap
from .culprits import amount, source_of
from .errors import Culprit, Leak
from .heap import Held, held
from .stillness import held_still

Step = Callable[[], object]

SMALLEST_CHUNK = 32
"""Bytes that the smallest malloc takes from the heap."""
MOST_SHARED_INT = 256
"""Larger numbers are objects of their own."""
CLEAR_STRETCH = 16
"""Steps in a row without any growth that clear a counter: each step of a leak would have taken its share."""
SAME_GROWTH = 12
"""So many windows that grow by the very same number are proof; nothing that settles does that."""


@dataclass(frozen=True)
class Quiet:
    """What a passed quiet pass saw: how many windows it took, and the last reading."""

    windows: int
    held: Held


def assert_quiet(
    step: Step, *, warmup: int = 4, windows: int = 4, steps: int = 8, settle: int = 48, named: bool = True
) -> Quiet:
    """Run windows of steps until so many `windows` in a row were quiet, for each counter; at most `settle`
    more.

    They are quiet if together they took less than half a block of Python's, half a chunk of C's heap and
    nothing of the device's memory a step: counters move a little from reading to reading, whatever the step
    does, and the longer the stretch the less that hides. A stretch of 16 steps without any growth will do
    too. Raises `Leak`, naming the counter and, after one
    more run under a profiler, the line; `named=False` spares that run, for a twin whose leak is known.
    """
    readings: deque[Held] = deque()  # its memory is there before the first reading, a list's is not
    with held_still():
        for _ in range(warmup):
            step()
        loud = _loud(deque([held()]), windows, steps)  # what looking takes itself is taken before, too
        readings.append(held())
        while (loud := _loud(readings, windows, steps)) and len(readings) <= windows + settle:
            if _proven(readings, loud, steps):
                break
            for _ in range(steps):
                step()
            readings.append(held())
        if loud:
            raise _report(readings, loud[0], step, steps, named=named)
    return Quiet(len(readings) - 1, readings[-1])


def _growth(readings: deque[Held], counter: str) -> list[int]:
    """By how much each window grew, without what the reading before it took itself."""
    grown = []
    for before, after in pairwise(readings):
        own = _blocks_of(before) if counter == "python_blocks" else 0
        grown.append(getattr(after, counter) - getattr(before, counter) - own)
    return grown


def _blocks_of(reading: Held) -> int:
    return 1 + sum(number > MOST_SHARED_INT for number in reading)


def _least(counter: str, steps: int) -> float:
    """The growth from which on so many steps are not quiet."""
    return {"python_blocks": steps / 2, "heap_bytes": steps * SMALLEST_CHUNK / 2}.get(counter, 1)


def _loud(readings: deque[Held], windows: int, steps: int) -> list[str]:
    """The counters that had no quiet stretch, nor a shorter one without any growth."""
    found = []
    for counter in Held._fields:
        grown = _growth(readings, counter)
        cleared = _has_stretch(grown, max(1, CLEAR_STRETCH // steps), 1)
        if not cleared and not _has_stretch(grown, windows, _least(counter, windows * steps)):
            found.append(counter)
    return found


def _has_stretch(grown: list[int], windows: int, least: float) -> bool:
    """Whether so many windows in a row together grew by less than this."""
    return any(sum(grown[start : start + windows]) < least for start in range(len(grown) - windows + 1))


def _proven(readings: deque[Held], loud: list[str], steps: int) -> bool:
    for counter in loud:
        last = _growth(readings, counter)[-SAME_GROWTH:]
        if len(last) == SAME_GROWTH and len(set(last)) == 1 and last[0] >= _least(counter, steps):
            return True
    return False


def _report(readings: deque[Held], counter: str, step: Step, steps: int, *, named: bool) -> Leak:
    grown = _growth(readings, counter)
    a_step = sum(grown) / (len(grown) * steps)
    what, culprit = {
        "python_blocks": (f"Python's heap grows by {a_step:.2f} blocks a step", blame_blocks),
        "heap_bytes": (f"C's heap grows by {amount(a_step)} a step", blame_heap),
        "cuda_bytes": (f"the device's memory grows by {amount(a_step)} a step", _no_blame),
        "cuda_blocks": (f"the device's memory grows by {a_step:.2f} blocks a step", _no_blame),
    }[counter]
    blamed = culprit(step, steps, grown[-1] / steps) if named else ()
    lines = [f"{what} (windows of {steps} steps: {', '.join(f'{g:+d}' for g in grown)})"]
    for found in blamed:
        lines.append(f"  {found.operation}")
        lines += [
            f"    {'called from' if number else 'born at'} {place}{'' if number else source_of(place)}"
            for number, place in enumerate(found.stack[:4])
        ]
        lines += [f"    held by {holder}" for holder in found.held_by]
    return Leak("\n".join(lines), blamed)


def _no_blame(step: Step, steps: int, leak: float) -> tuple[Culprit, ...]:
    return ()
