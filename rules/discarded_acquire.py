"""PA104 discarded-acquire: the result of an acquire is thrown away.

## What
Nothing keeps what the call returned, so nobody can ever release it.

## Why
It leaks on the spot, once a call. Often the call was meant as a warm-up or a reservation, or an
expression took a copy of the lease and dropped the lease itself.

## Example
See below: `+ bias` makes a new tensor, the lease is gone.

## Fix
safety
Safe where the result is not used at all: bind it and release it.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, Loss
from auditor.fixes.discarded import bound_and_released
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA104", name="discarded-acquire", severity=Severity.ERROR)
BAD = """\
def add_bias(pool, shape, bias):
    return pool.allocate(shape) + bias
"""
GOOD = """\
def add_bias(pool, shape, bias):
    with pool.lease(shape, zero=True) as buf:
        return buf + bias
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        for leak in lease.leaks:
            if leak.loss is Loss.DISCARDED:
                yield META.finding(
                    lease.span, lease.symbol, f"the result of `{lease.text}` is discarded", leak.trace
                )
                break


def fix(case: Case) -> FixOffer | None:
    return bound_and_released(case)
