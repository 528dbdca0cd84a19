"""PA102 early-exit-leak: released or handed over on some ways out, lost on others.

## What
Some path releases the lease or hands it on; another one (return, break, continue, falling off the end, a
handler that swallows an exception) leaves while it is still held. So does a pool's own method that takes out
of its store, which nobody fills again, and passes over what does not suit the caller, or what it has only
cleaned on its way through the store, or drops one without counting it down where others do. An amount or a
permit may be given back by whoever finds it noted: of those that a way out notes nowhere, or answers with
None where others answer with what it goes with, it is said. So is it of what was counted, pinned or charged
in a turn of a loop that a `continue` leaves before the rest of the turn notes it or hands it on, and in a
function that only counts how often it could, or is a question by its name (`fits(request)`), and of what a
callback, which is its only end, gives back on some of its ways, or which a function of the tree may return
without calling.

## Why
The common case works, so tests pass; the rare one leaks: a request that is rejected, a batch that is
empty, a lookup that misses.

## Example
See below: the early return skips the release.

## Fix
safety
Safe where the lease is local: a release before the early exit, or try/finally.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import LEAVING, Facts, Loss, named
from auditor.fixes.exits import released_on_exit
from auditor.fixes.gathered import gathered_given_back
from auditor.fixes.rollback import rolled_back
from auditor.fixes.try_finally import bounded
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA102", name="early-exit-leak", severity=Severity.ERROR)
BAD = """\
def load(pool, request):
    block = pool.acquire(request.size)
    if request.cancelled:
        return None
    request.fill(0)
    pool.release(block)
    return request
"""
GOOD = """\
def load(pool, request):
    block = pool.acquire(request.size)
    if request.cancelled:
        pool.release(block)
        return None
    pool.release(block)
    return request
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        if not (lease.released or lease.handed_over):
            continue
        for leak in lease.leaks:
            if leak.loss in LEAVING:
                way_out = (
                    "at the function's end"
                    if leak.loss is Loss.FALL_THROUGH
                    else f"on the way out at line {leak.at.line}"
                )
                message = f"{named(lease)} from `{lease.text}` is still held {way_out}"
                yield META.finding(lease.span, lease.symbol, message, leak.trace)
                break


def fix(case: Case) -> FixOffer | None:
    return bounded(case) or gathered_given_back(case) or released_on_exit(case) or rolled_back(case)
