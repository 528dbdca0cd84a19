"""The pool pass: whatever a step borrows it has given back when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .births import Frames, readable, stack_here
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
    out: dict[object, Frames] = field(default_factory=dict)
    abandoned: list[Frames] = field(default_factory=list)
    """Leases whose handle has died: its identity was given to a later one."""

    def called(self, act: str, pool: Any, handles: tuple[Any, ...]) -> None:
        """Take down one lend or take-back."""
        if act == "lend":
            for key in _keys(pool, handles):
                if key in self.out:
                    self.abandoned.append(self.out[key])
                self.out[key] = stack_here()
        elif act == "take back":
            for key in _keys(pool, handles):
                self.out.pop(key, None)

    def standing(self) -> list[Frames]:
        """The stacks of the leases that were not given back, of those that count."""
        stacks = [*self.abandoned, *self.out.values()]
        return [frames for frames in stacks if goes_through(frames, self.line)] if self.line else stacks


def assert_no_leases(step: Step, *pools: Any, steps: int = 3, line: str = "") -> None:
    """After every step as many leases stand as before; and none once `step.close()`, if there is one, has
    run. A class stands for all pools of it. With `line` (`folder/file.py:12`) only what was borrowed through
    that line counts.
    """
    if not pools:
        raise ValueError("assert_no_leases was given no pool: name the pools that the step borrows from")
    counter = Counter(line)
    counted = () if line else pools  # what pools say of themselves names no lines
    with counter_watched(pools, counter.called):
        before = _counted(counted)
        step()
        kept, kept_by_pools = len(counter.standing()), _counted(counted)
        for _ in range(steps - 1):
            step()
        grown = len(counter.standing()) - kept or sum(_counted(counted)) - sum(kept_by_pools)
        close = getattr(step, "close", None)
        if close is not None and not grown:
            close()
        left = len(counter.standing()) or sum(_counted(counted)) - sum(before)
    if grown or left:
        raise lease_report(counter, grown or left, steps)


def lease_report(counter: Counter, leases: int, steps: int, why: str = "") -> Leak:
    """The failure that names the lines which borrowed and did not give back."""
    by_place: dict[Frames, int] = {}
    for frames in counter.standing():
        by_place[frames] = by_place.get(frames, 0) + 1
    shown = [(frames[_place(frames, counter.line) or 0 :], number) for frames, number in by_place.items()]
    culprits = tuple(_culprit(frames, number / steps) for frames, number in shown)[:MOST_NAMED]
    lines = [f"{leases} lease{'' if leases == 1 else 's'} not given back after {steps} steps{why}"]
    for culprit in culprits:
        lines.append(
            f"  {culprit.storages_a_step:g} a step, borrowed at {culprit.line}{source_of(culprit.line)}"
        )
        lines += [f"    called from {place}" for place in culprit.stack[1:4]]
    return Leak("\n".join(lines), culprits)


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
