# poolaudit leaktests, sha256 cfee851456ea3601: written again as long as that is the digest of the rest
"""The pool pass: whatever a step borrows it has given back when it is over."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .births import Frames, Marks, frames_of, marks_here, readable
from .culprits import source_of
from .errors import Culprit, Leak
from .pools import PAIRS, counter_watched

Step = Callable[[], object]
MOST_NAMED = 5
WAYS_TO_LEND = (*(lend for lend, _ in PAIRS), "lease")


@dataclass
class Counter:
    """What went over the counter of some pools and did not come back, with the stack that asked for it."""

    line: str = ""
    """Only leases that were borrowed through this `folder/file.py:line` count; empty: all."""
    out: dict[object, Marks] = field(default_factory=dict)
    abandoned: list[Marks] = field(default_factory=list)
    """Leases whose handle has died: its identity was given to a later one."""
    lent: int = 0
    """How often something was lent, given back or not."""

    def called(self, act: str, pool: Any, handles: tuple[Any, ...]) -> None:
        """Take down one lend or take-back."""
        if act == "lend":
            self.lent += 1
            marks = marks_here()
            for key in _keys(pool, handles):
                if key in self.out:
                    self.abandoned.append(self.out[key])
                self.out[key] = marks
        elif act == "take back":
            for key in _keys(pool, handles):
                self.out.pop(key, None)

    def standing(self) -> list[Frames]:
        """The stacks of the leases that were not given back, of those that count."""
        stacks = [frames_of(marks) for marks in (*self.abandoned, *self.out.values())]
        return [frames for frames in stacks if goes_through(frames, self.line)] if self.line else stacks


def assert_no_leases(step: Step, *pools: Any, steps: int = 3, line: str = "") -> int:
    """After every step as many leases stand as before; and none once `step.close()`, if there is one, has
    run. Returns how often the pools lent: with 0 it has seen nothing. A class stands for all pools of it.
    With `line` (`folder/file.py:12`) only what was borrowed through that line counts.
    """
    if not pools:
        raise ValueError("assert_no_leases was given no pool: name the pools that the step borrows from")
    counter = Counter(line)
    counted = () if line else pools  # what pools say of themselves names no lines
    with counter_watched(pools, counter.called):
        before = _counted(counted)
        step()
        kept, kept_by_pools = counter.standing(), _counted(counted)
        for _ in range(steps - 1):
            step()
        grown = max(len(counter.standing()) - len(kept), sum(_counted(counted)) - sum(kept_by_pools))
        if grown > 0:
            raise lease_report(counter, kept, grown, f"by {number_of(steps - 1, 'step')}", steps - 1)
        close = getattr(step, "close", None)
        if close is not None:
            close()
        left = max(len(counter.standing()), sum(_counted(counted)) - sum(before))
    if left > 0:
        over = f"after {number_of(steps, 'step')}{' and close()' if close is not None else ''}"
        raise lease_report(counter, [], left, over)
    return counter.lent


def lease_report(
    counter: Counter, kept: Sequence[Frames], leases: int, when: str, over: int | None = None
) -> Leak:
    """The failure that names the lines which borrowed and did not give back, but for what is `kept` rightly;
    `over` so many steps, if every one of them may have a part in it.
    """
    shown = Tally(counter.standing())
    shown.subtract(kept)
    grown = [(frames[_place(frames, counter.line) or 0 :], n) for frames, n in shown.most_common() if n > 0]
    culprits = tuple(_culprit(frames, number / (over or 1)) for frames, number in grown)[:MOST_NAMED]
    lines = [f"{number_of(leases, 'lease')} not given back {when}"]
    for culprit, (_, number) in zip(culprits, grown, strict=False):
        lines.append(f"  {_rate(number, over)}, borrowed at {culprit.line}{source_of(culprit.line)}")
        lines += [f"    called from {place}" for place in culprit.stack[1:4]]
    if len(grown) > len(culprits):
        lines.append(f"  and at {number_of(len(grown) - len(culprits), 'other place')}")
    return Leak("\n".join(lines), culprits)


def _rate(number: int, steps: int | None) -> str:
    if steps is None or steps == 1:
        return str(number)
    return f"{number // steps} a step" if number % steps == 0 else f"{number} in {steps} steps"


def number_of(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _culprit(frames: Frames, a_step: float) -> Culprit:
    stack = readable(_beyond_wrappers(frames)) or readable(frames)
    line = stack[0] if stack else "an unknown line"
    return Culprit("a pool's lease", a_step, 0.0, line, tuple(stack), ())


def _beyond_wrappers(frames: Frames) -> Frames:
    """The stack from the first function on that is not itself a way to lend: that one owes the release."""
    for number, (code, _) in enumerate(frames):
        if not code.co_name.strip("_").startswith(WAYS_TO_LEND):
            return frames[number:]
    return frames


def goes_through(frames: Frames, line: str) -> bool:
    """Whether a stack has `folder/file.py:line` among its lines."""
    return _place(frames, line) is not None


def _place(frames: Frames, line: str) -> int | None:
    path, _, number = line.rpartition(":")
    end = "/".join(path.split("/")[-2:])
    for place, (code, at) in enumerate(frames):
        if str(at) == number and f"/{code.co_filename}".endswith(f"/{end}"):
            return place
    return None


def _counted(pools: tuple[Any, ...]) -> list[int]:
    """The leases that pools which count them say stand."""
    found = []
    for pool in pools:
        stats = (
            pool.stats() if not isinstance(pool, type) and callable(getattr(pool, "stats", None)) else None
        )
        leases = stats.get("leases") if isinstance(stats, dict) else getattr(stats, "leases", None)
        found.append(leases if isinstance(leases, int) else 0)
    return found


def _keys(pool: Any, handles: tuple[Any, ...]) -> Iterator[object]:
    """What tells leases apart: numbers by value, everything else by identity."""
    for handle in handles:
        if isinstance(handle, (list, tuple)) and all(isinstance(item, int) for item in handle):
            yield from ((id(pool), item) for item in handle)
        elif isinstance(handle, (int, str)) and not isinstance(handle, bool):
            yield id(pool), handle
        elif handle is not None:
            yield id(pool), f"object {id(handle)}"
