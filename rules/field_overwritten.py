"""PA107 field-overwritten: a field's held lease is overwritten.

## What
A field that holds a lease gets another one, or None, while the first was not released: in the same
function, or in a method that neither asks whether the field is empty nor gives back what is in it, and that
runs once a step (`forward`, `step`, ...), finds the field filled by `__init__` (the lease of that is reported
as well), asks for what was noted of the last one (`if score > self.best_score:`), or is called by a handler
because work with what is in the field failed (`except OSError: self.connect()`), or fills it in that handler.

So is a method that others may call again: any that fills a field of its own object and does not introduce the
work, as `begin` and `start` do, or puts its caller's data into the lease all the same. The same is asked of a
place in a table (`self.pinned[name] = ...`) and of a field of an object that was found in one; of a key only
where another method reckons with it, it is known elsewhere, or it is a name and no id; of a field of
an object that the method is given only where it is renewed (`refresh(request)`) or filled in each step; or
where filling is all that a method does, by its name nothing that happens once (`hold_ready(key)`,
`speculate(request)`), and no other one fills the place. Such a method may also work with what it puts into a
table, where nobody but who ends its entries has to do with the table.
Whatever the pool, it is said of a method whose name tells that there is one (`reopen`,
`redraft(sequence)`), or whose own test does (`if self.scratch is None or self.scratch.size < n:`), or
beside which another one that fills the table looks first, unless something on the way to the store touches
what is there or rules it out. Nothing is said where a caller looks first. So is a shared block that gives
its place to a copy (`table[-1] = fresh`, where `table[-1].users > 1` was asked) and keeps the share, and a
table that an outer loop fills under the same keys again.

What a pool of the tree lent is forgotten where a method that others call puts None over it, and only other
methods give it back.

## Why
One lease a step is lost; the cleanup at the end releases the last one only.

## Example
See below: every call of `forward` loses the buffer of the call before.

## Fix
safety
Unsafe: a release before the store.
"""

from collections.abc import Iterator, Set

from auditor.case import Case
from auditor.facts import Facts, Loss, StoredField, kept
from auditor.fixes.fields import released_before_store
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA107", name="field-overwritten", severity=Severity.ERROR)
BAD = """\
class Attention:
    def forward(self, x):
        self.scores = self.pool.allocate(x.shape)
        self.scores.copy_(x)

    def close(self):
        self.pool.deallocate(self.scores)
"""
GOOD = """\
class Attention:
    def forward(self, x):
        if self.scores is not None:
            self.pool.deallocate(self.scores)
        self.scores = self.pool.allocate(x.shape)
        self.scores.copy_(x)

    def close(self):
        self.pool.deallocate(self.scores)
"""


def check(facts: Facts) -> Iterator[Finding]:
    overwriting = _overwriting(facts)
    for lease in facts.leases:
        leak = next((leak for leak in lease.leaks if leak.loss is Loss.OVERWRITTEN), None)
        if leak is not None:
            message = f"`{leak.holder}` is overwritten at line {leak.at.line} while it holds `{lease.text}`"
            yield META.finding(lease.span, lease.symbol, message, leak.trace)
            continue
        again = next((stored for stored in lease.fields if stored.overwrite is not None), None)
        if again is not None:
            message = f"each call stores another lease in `{_place(again)}`; the one before is not released"
            if again.overwrite is not None and lease.symbol.endswith("_init__"):
                line = again.overwrite.at.line
                message = f"`{_place(again)}` is overwritten at line {line}, and nothing releases it before"
            yield META.finding(lease.span, lease.symbol, message, kept(lease, again))
            continue
        forgotten = next((stored for stored in lease.fields if _forgotten(stored)), None)
        if forgotten is not None and not _told_there(forgotten, overwriting):
            line, name = forgotten.drops[0].at.line, forgotten.field.written
            message = f"`{name}` is forgotten at line {line}; `{forgotten.released_by[0]}` would release it"
            yield META.finding(lease.span, lease.symbol, message, kept(lease, forgotten))


def _overwriting(facts: Facts) -> Set[tuple[str, int]]:
    """Where another lease is put over the one before: told of that lease, once."""
    found = (stored.overwrite for lease in facts.leases for stored in lease.fields)
    return {(leak.at.path, leak.at.line) for leak in found if leak is not None}


def _told_there(forgotten: StoredField, overwriting: Set[tuple[str, int]]) -> bool:
    return all((drop.at.path, drop.at.line) in overwriting for drop in forgotten.drops)


def _place(stored: StoredField) -> str:
    return stored.overwrite.holder if stored.overwrite is not None else stored.field.path


def _forgotten(stored: StoredField) -> bool:
    """One of the methods that end the object only puts None into the field, the others release it."""
    plain = "[*]" not in stored.field.path
    return plain and bool(stored.drops and stored.released_by) and not stored.escapes


def fix(case: Case) -> FixOffer | None:
    return released_before_store(case)
