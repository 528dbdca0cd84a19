"""PA111 context-manager-without-finally: a `@contextmanager` that releases after its yield, but not in a
finally.

## What
An exception in the body of the caller's `with` is raised at the `yield`. Without try/finally around
it the release is skipped.

## Why
The `with` at the call site promises that the lease comes back whatever happens, and does not keep it.

## Example
See below.

## Fix
safety
Safe: try/finally around the yield.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, Loss, named
from auditor.fixes.try_finally import bounded
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA111", name="context-manager-without-finally", severity=Severity.WARNING)
BAD = """\
from contextlib import contextmanager


@contextmanager
def scratch(pool, shape):
    buf = pool.allocate(shape)
    yield buf
    pool.deallocate(buf)
"""
GOOD = """\
from contextlib import contextmanager


@contextmanager
def scratch(pool, shape):
    buf = pool.allocate(shape)
    try:
        yield buf
    finally:
        pool.deallocate(buf)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        if not lease.in_context_manager:
            continue
        leak = next((leak for leak in lease.leaks if leak.loss is Loss.CLOSE), None)
        if leak is not None:
            lost = "is lost when the body of the `with` raises: release it in a finally"
            message = f"{named(lease)} from `{lease.text}` {lost}"
            yield META.finding(lease.span, lease.symbol, message, leak.trace)


def fix(case: Case) -> FixOffer | None:
    return bounded(case)
