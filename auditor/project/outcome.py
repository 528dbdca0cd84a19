"""What became of one acquire call, as far as its own function tells."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from auditor.flow.effects import Acquisition
from auditor.flow.lease import EXCEPTIONAL, Lease
from auditor.ir.ops import RESULT, Path
from auditor.project.code.field_paths import shortened
from auditor.project.code.modules import Function


@dataclass(slots=True)
class Outcome:
    """One acquire decided. `returned` (by the ways out `returned_at`) and `stored` are where it went, for
    wrappers and fields; `returned_too` are other fields of what is returned that are the lease as well."""

    function: Function
    call: ast.Call
    acquisition: Acquisition
    lease: Lease
    returned: Path | None = None
    returned_at: frozenset[int] = frozenset()
    returned_too: frozenset[Path] = frozenset()
    flags: frozenset[tuple[str, bool]] = frozenset()
    own: frozenset[tuple[str, bool]] = frozenset()
    under: frozenset[tuple[str, bool]] = frozenset()  # what holds of its object's fields at the acquire
    unless: frozenset[str] = frozenset()
    asked: frozenset[tuple[str, bool]] = frozenset()
    says: frozenset[tuple[str, bool]] = frozenset()  # of the result, where it was stored
    stored: list[tuple[int, Path]] = field(default_factory=list)
    beside: frozenset[Path] = frozenset()
    together: frozenset[frozenset[Path]] = frozenset()  # of those, what holds it on one way
    noted: frozenset[tuple[int, Path]] = frozenset()  # where what was marked has been put, and by which node
    held_over: Path = ()  # where those who call the function may end what it leaves held
    recorded: bool = False
    shown: bool = False  # its object keeps it, whoever gets it
    unknown: bool = False


def merged_outcome(one: Outcome, other: Outcome) -> Outcome:
    """Copies of one call in different copies of a `finally` body, or two leases in one result."""
    leaks = {(leak.loss, leak.at): leak for leak in (*other.lease.leaks, *one.lease.leaks)}
    one.lease = replace(
        one.lease,
        leaks=tuple(leaks.values()),
        released=one.lease.released or other.lease.released,
        handed_over=one.lease.handed_over or other.lease.handed_over,
        releases=tuple(sorted({*one.lease.releases, *other.lease.releases})),
    )
    one.returned = one.returned or other.returned
    one.stored += other.stored
    one.beside |= other.beside
    one.together |= other.together
    one.noted |= other.noted
    return one


def lie_together(outcome: Outcome, one: Path, other: Path) -> bool:
    """Whether it ever lies in both: not where `if late: self.late = row; return` comes before
    `self.rows[key] = row`."""
    ways = [{shortened(path) for path in way} for way in outcome.together]
    known = all(any(path in way for way in ways) for path in (one, other))
    return not known or any(one in way and other in way for way in ways)


def on_other_ways(outcome: Outcome) -> Iterator[tuple[int, Path]]:
    """`self.current.append(row)` of a row that goes into `self.full` with the others on one way only."""
    known = {shortened(path) for _, path in outcome.stored}
    apart = [sorted(way) for way in outcome.together if known.isdisjoint(map(shortened, way))]
    for node, _ in outcome.stored[:1]:
        yield from ((node, way[0]) for way in sorted(apart) if way)


def has_gone_to_the_caller(outcome: Outcome) -> bool:
    """`self.last = draft`, `return draft`: whoever gets it may end it."""
    return outcome.returned is not None or any(path[:1] == RESULT for path in outcome.beside)


def lie_apart(one: Path, other: Path) -> bool:
    """`[0]` and `[1]` of a tuple, two fields of an object: not one lease that two names hold."""
    return all(map(len, (one, other))) and one[: len(other)] != other[: len(one)]


def loses_normally(lease: Lease) -> bool:
    """On some way without an exception."""
    return any(leak.loss not in EXCEPTIONAL for leak in lease.leaks)
