"""PA106 field-never-released: stored on self, and no method of the class releases it.

## What
The lease lives as long as the object, and neither the class, its bases and subclasses, nor anybody
who reaches the field by its name gives it back.

So is a field of a record that holds several leases (`Chunk(pages, slot)`), where whoever ends such a record
gives back another field of it, and all that the project does with this one is to work with what is there. So
is one of two ends of such records, `finish(job)` and `preempt(job)`, that forgets a lease which the other
gives back, or puts the record back in line with it, where the next `admit(job)` puts another over it; and a
method that says no to a record, leaves a lease on it, and is asked again for the same one; and one that sees
the first of a queue, puts a lease on it and leaves it there. So is what `abort()` never speaks of where
`commit()` gives it back and nobody who calls the one calls the other; what an object took that another
class's table strikes off without the end by which it ends others; and of two that end themselves the one
whose `close()` nobody calls. So is what is given back where a flag says so (`if request.use_draft:`) when
another method turns the flag and leaves the lease; and what `begin_step()` takes whenever `self.world > 1`
and `end_step()` gives back only if, besides, the step was not skipped.

## Why
Every object that is made and dropped costs a lease: models reloaded, workers restarted, engines made
for each test.

## Example
See below: there is no `close`.

## Fix
safety
Unsafe: a cleanup method and context manager are added, and somebody must call them.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, StoredField, kept
from auditor.fixes.fields import released_by_cleanup
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA106", name="field-never-released", severity=Severity.ERROR)
BAD = """\
class Cache:
    def __init__(self, pool, shape):
        self.pool = pool
        self.keys = pool.allocate(shape)
"""
GOOD = """\
class Cache:
    def __init__(self, pool, shape):
        self.pool = pool
        self.keys = pool.allocate(shape)

    def close(self):
        self.pool.deallocate(self.keys)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        for stored in lease.fields:
            plain = "[*]" not in stored.field.path
            if plain and not (stored.released_by or stored.escapes):
                message = f"`{stored.field.written}` holds `{lease.text}`, and {_who(stored)}"
                yield META.finding(lease.span, lease.symbol, message, kept(lease, stored))
                break


def _who(stored: StoredField) -> str:
    if stored.partly_by:
        return f"`{stored.partly_by[0]}` keeps it on one of its ways out"
    return "nothing releases it"


def fix(case: Case) -> FixOffer | None:
    return released_by_cleanup(case)
