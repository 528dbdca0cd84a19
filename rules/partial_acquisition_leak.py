"""PA109 partial-acquisition-leak: one of several acquires fails, and the earlier ones stay held.

## What
Two or more leases are needed. On the branch that handles the failure of a later one (it returned None, or its
exception was caught) the function leaves without giving back the earlier. So it does where the later acquire
says in its own body `raise PoolEmpty` when nothing is left, and no handler stands around it, also where both
are gathered (`await gather(pool.take(), other.take())`); in `__init__` and `__enter__` also where the earlier
lies in a field: nobody can close what was never made.

## Why
A later acquire fails when the pool is nearly empty, and then each retry takes one more block away for good.

## Example
See below: `k` is lost when there is no room for `v`.

## Fix
safety
Safe: a release on the failing branch; of all that a loop has gathered in a list or dict. Unsafe
where a handler further out swallows the failure: the release comes before it gets there.
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

META = Meta(code="PA109", name="partial-acquisition-leak", severity=Severity.ERROR)
BAD = """\
def grow(pool, request):
    k = pool.acquire(1)
    v = pool.acquire(1)
    if v is None:
        return False
    request.attach(k, v)
    return True
"""
GOOD = """\
def grow(pool, request):
    k = pool.acquire(1)
    v = pool.acquire(1)
    if v is None:
        pool.release(k)
        return False
    request.attach(k, v)
    return True
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        for leak in lease.leaks:
            if leak.failed is not None and leak.loss in LEAVING | {Loss.RAISE}:
                message = f"{named(lease)} from `{lease.text}` stays held when `{leak.failed}` fails"
                yield META.finding(lease.span, lease.symbol, message, leak.trace)
                break


def fix(case: Case) -> FixOffer | None:
    return gathered_given_back(case) or released_on_exit(case) or bounded(case) or rolled_back(case)
