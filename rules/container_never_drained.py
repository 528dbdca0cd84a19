"""PA110 container-never-drained: a container of leases that nothing drains, or whose entries are thrown away.

## What
Leases are put into a list or dict, of the object or local. Nothing takes them out to release them,
or `clear()`, `del` or an assignment throws them away. Clearing a dict of leases is not releasing them.

So is an entry that a method takes out and loses on some way: a timer that was cancelled, a transfer that
failed, the requests that a filter leaves out, what was popped for a look, a job of which a worker only logs
that it has failed; also of containers into which the lease comes from another one, and of records that note
the key of a pin. So is a count, or an entry beside a record, that `finish(job)` ends and `abort(job)` leaves.
Where that method gives it back or puts it in again on another way, the path shows from where it is taken out
to where it is lost. So is what is left of a list that was taken out of a table when a part of it has been
given back (`free(blocks[0])`), and of a list inside a record that a method cuts (`seq.pages =
seq.pages[:n]`). So is a permit that was taken for what goes into a queue, where whoever takes that out again
passes it over. Nothing is said where whoever calls that method gives back himself, nor where what the way
asks for is set by somebody who does. Where three acquires or more put their leases into what one line lets go
of, that line is told, once.

## Why
The container is emptied, so its length looks healthy, while the pool's count only grows.

## Example
See below: `reset` forgets the leases.

## Fix
safety
Unsafe: release the entries before they are dropped. What a method takes out and loses is repaired in that
method, as PA101, PA102, PA105 and PA109 do at an acquire, and as safe as there; only if that ends every loss
that the finding tells of.
"""

from collections.abc import Iterator, Sequence

from auditor.case import Case
from auditor.facts import Facts, Leak, Lease, Loss, StoredField, kept
from auditor.fixes.drained import drained_before_drop
from auditor.fixes.taken_out import given_back_where_taken
from auditor.model import Finding, FixOffer, Severity, Span, Step
from auditor.rule import Meta

META = Meta(code="PA110", name="container-never-drained", severity=Severity.WARNING)
BAD = """\
class Staging:
    def __init__(self, pool):
        self.pool = pool
        self.buffers = {}

    def stage(self, key, shape):
        self.buffers[key] = self.pool.allocate(shape)

    def reset(self):
        self.buffers.clear()
"""
GOOD = """\
class Staging:
    def __init__(self, pool):
        self.pool = pool
        self.buffers = {}

    def stage(self, key, shape):
        self.buffers[key] = self.pool.allocate(shape)

    def reset(self):
        for buffer in self.buffers.values():
            self.pool.deallocate(buffer)
        self.buffers.clear()
"""


LETTING_GO = frozenset({Loss.DROPPED, Loss.DELETED})


SEVERAL = 3
"""So many acquires whose leases one line lets go of: it is told of that line, once."""


def check(facts: Facts) -> Iterator[Finding]:
    together: dict[Span, list[tuple[Lease, StoredField]]] = {}
    for lease in facts.leases:
        leak = next((leak for leak in lease.leaks if leak.loss is Loss.DROPPED), None)
        if leak is not None:
            message = f"the container of `{lease.text}` drops its entries at line {leak.at.line}"
            yield META.finding(lease.span, lease.symbol, message, leak.trace)
        elif (stored := _never_drained(lease)) is not None:
            at = next((drop.at for drop in _drops(stored)), lease.span)
            together.setdefault(at, []).append((lease, stored))
    for at, told in together.items():
        if len(told) >= SEVERAL:
            yield _where_they_go(at, told)
            continue
        for lease, stored in told:
            yield META.finding(lease.span, lease.symbol, _message(lease, stored), kept(lease, stored))


def _never_drained(lease: Lease) -> StoredField | None:
    """The first container of it that nothing drains, or that loses it."""
    return next(
        (
            stored
            for stored in lease.fields
            if "[*]" in stored.field.path
            if _drops(stored) or not (stored.released_by or stored.escapes)
        ),
        None,
    )


def _drops(stored: StoredField) -> list[Leak]:
    return [drop for drop in stored.drops if drop.loss in LETTING_GO or not stored.escapes]


def _where_they_go(at: Span, told: Sequence[tuple[Lease, StoredField]]) -> Finding:
    """One finding for all who put something there, of the line that loses it."""
    (first, stored), *_ = told
    put = [Step(lease.span.path, lease.span.line, lease.span.column, "acquired here") for lease, _ in told]
    trace = (*put, *(step for step in kept(first, stored) if step not in put))
    return META.finding(
        at, stored.field.owner, f"{_message(first, stored)}; {len(told)} calls put one there", trace
    )


def _message(lease: Lease, stored: StoredField) -> str:
    name = stored.field.written.partition("[")[0]
    drops = _drops(stored)
    if drops and drops[0].trace:
        taken, lost = drops[0].at.line, drops[0].trace[-1].line
        return f"an entry of `{name}`, taken out at line {taken}, is still held at line {lost}"
    if drops and drops[0].loss is Loss.DELETED:
        return f"an entry of `{name}` goes at line {drops[0].at.line}, and nothing releases it"
    if drops:
        how = "with only a part of them released" if drops[0].parted else "without releasing its leases"
        return f"`{name}` is emptied at line {drops[0].at.line} {how}"
    return f"`{name}` collects leases of `{lease.text}`, and {_who(stored)}"


def _who(stored: StoredField) -> str:
    if stored.partly_by:
        return f"`{stored.partly_by[0]}` keeps one on one of its ways out"
    return "nothing drains it"


def fix(case: Case) -> FixOffer | None:
    return given_back_where_taken(case) or drained_before_drop(case)
