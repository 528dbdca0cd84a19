"""PA103 exception-leak: lost when a statement between acquire and release raises.

## What
The ordinary ways out are balanced, but an exception (a raise, an assert, a call that fails), a
cancellation at an await, or the closing of a generator leaves the function while the lease is held. With
`--exceptions explicit` calls do not count, with `none` nothing does.

A lease that the function hands over at the end is reported only for its own `raise` and `assert`
statements, and for a callee that says `raise` in so many words: of a class of the project's own, or of one
that a caller of the function has a handler for. That any other call before the hand-over could fail is true
of nearly every line and seldom worth a change.

## Why
Out-of-memory errors, timeouts and client disconnects are exceptions, and they come when memory is
short. A server that survives them by catching higher up loses a block each time.

## Example
See below: `model` may raise.

## Fix
safety
Safe where the lease is local: try/finally. One that is handed over later is released where the
statement raises (`except BaseException`), a list of them one by one.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import EXCEPTIONAL, Facts, Loss, named
from auditor.fixes.exchanged import released_together
from auditor.fixes.exits import released_on_exit
from auditor.fixes.gathered import gathered_given_back
from auditor.fixes.rollback import rolled_back
from auditor.fixes.try_finally import bounded
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA103", name="exception-leak", severity=Severity.WARNING)
BAD = """\
def run(pool, model, x):
    buf = pool.acquire(x.numel())
    y = model(x, buf)
    pool.release(buf)
    return y
"""
GOOD = """\
def run(pool, model, x):
    buf = pool.acquire(x.numel())
    try:
        return model(x, buf)
    finally:
        pool.release(buf)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        for leak in lease.leaks:
            if leak.loss is Loss.RAISE or (leak.loss in EXCEPTIONAL and not lease.handed_over):
                message = f"{named(lease)} from `{lease.text}` is lost if line {leak.at.line} raises"
                yield META.finding(lease.span, lease.symbol, message, leak.trace)
                break


def fix(case: Case) -> FixOffer | None:
    return (
        bounded(case)
        or released_together(case)
        or gathered_given_back(case)
        or released_on_exit(case)
        or rolled_back(case)
    )
