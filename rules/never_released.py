"""PA101 never-released: acquired, and no path gives it back.

## What
A lease is acquired, held by local names only, and the function is left without releasing it or
handing it over on any path. Or something is pinned, and nothing in the project ever calls what unpins it.

## Why
The pool counts it as in use for ever. One call costs one buffer or block; a serving loop that makes
the call for every request runs out of blocks after hours, far from the line that took them.

## Example
See below: the sum is returned, the lease is not.

## Fix
safety
Safe where the lease is local: `with pool.lease(...)`, or try/finally around its life.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import LEAVING, Facts, Lease, Loss, named
from auditor.fixes.try_finally import bounded
from auditor.model import Finding, FixOffer, Severity, Step
from auditor.rule import Meta

META = Meta(code="PA101", name="never-released", severity=Severity.ERROR)
BAD = """\
def attend(pool, q):
    scores = pool.allocate(q.shape)
    scores.copy_(q)
    return scores.sum()
"""
GOOD = """\
def attend(pool, q):
    scores = pool.allocate(q.shape)
    try:
        scores.copy_(q)
        return scores.sum()
    finally:
        pool.deallocate(scores)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        lost = [leak for leak in lease.leaks if leak.loss in LEAVING | {Loss.DROPPED}]
        if lost and not lease.released and not lease.handed_over:
            message = f"`{lease.text}` is never released: {named(lease)} is lost on every way out"
            yield META.finding(lease.span, lease.symbol, message, lost[0].trace)
        elif lease.unasked and not lost:
            message = f"`{lease.text}` is never released: nothing calls `{lease.unasked}`"
            yield META.finding(lease.span, lease.symbol, message, (_begun(lease),))


def _begun(lease: Lease) -> Step:
    return Step(lease.span.path, lease.span.line, lease.span.column, "marked here, for ever")


def fix(case: Case) -> FixOffer | None:
    return bounded(case)
