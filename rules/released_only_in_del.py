"""PA404 released-only-in-del: what a class keeps is given back by `__del__` and by nothing else.

What: a class keeps a lease on self, and of all methods and functions of the project only `__del__` gives it
back.

Why: `__del__` runs when the last reference dies. In a reference cycle that is whenever the collector
comes by; a traceback that somebody keeps, a profiler or a closure holds it back for hours; at the end of
the process the pool may be gone before it; and an exception in it is printed and dropped. Until then the
memory stays taken, and there is no call with which a caller could say that he is done.

Not reported: classes that have another method which releases it (`close`, `__exit__`,
`cleanup_memory_pool`), their own or inherited, `weakref.finalize`, leases that somebody else releases.

Example:
    class Staging:
        def __init__(self, pool): self.block = pool.allocate(shape); self.pool = pool
        def __del__(self): self.pool.deallocate(self.block)

Fix: a `close` method (and `__enter__`, `__exit__`) that gives back, with `__del__` calling it at most as
a net. Unsafe: somebody has to call it. Offered where `__del__` does nothing but give fields back.

In the field: nothing in 20,000 files of 19 public packages, true or false; its fixtures are all that shows
it at work. It is on because it is quiet (docs/field-notes-integration.md).
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, PooledClass, StoredField, kept
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA404", name="released-only-in-del", severity=Severity.WARNING)

BAD = """\
class Staging:
    def __init__(self, pool, shape):
        self.pool = pool
        self.block = pool.allocate(shape)

    def __del__(self):
        self.pool.deallocate(self.block)
"""

GOOD = """\
class Staging:
    def __init__(self, pool, shape):
        self.pool = pool
        self.block = pool.allocate(shape)

    def close(self):
        self.pool.deallocate(self.block)
        self.block = None

    def __del__(self):
        if self.block is not None:
            self.close()
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.pooled:
        yield from _first(each)


def _first(each: PooledClass) -> Iterator[Finding]:
    """One for a class: the class is what lacks a cleanup."""
    for lease in each.leases:
        for stored in lease.fields:
            if _only_in_del(stored):
                message = f"`{each.entry.name}` gives back `self.{stored.field.path}` only in `__del__`"
                yield META.finding(each.entry.span, each.entry.qualname, message, kept(lease, stored))
                return


def _only_in_del(stored: StoredField) -> bool:
    names = {name.rpartition(".")[2] for name in stored.released_by}
    return names == {"__del__"} and not stored.escapes


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.cleanups import closed  # only where there is a finding

    return closed(case)
