"""PA105 lease-rebound: the only name of a held lease is bound to something else, or deleted.

## What
After `out = out / n` the name means the quotient. The lease has no name any more, and what is
returned or released later is not what was acquired. In-place operations and views keep identity;
arithmetic, `cat`, `clone` and `contiguous` make new tensors.

## Why
The code looks balanced, the later `deallocate(out)` is even there, but it is given a tensor that the
pool never handed out.

## Example
See below.

## Fix
safety
Safe where an in-place form or a second name keeps the meaning; otherwise none.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, Loss
from auditor.fixes.rebound import kept_by_name
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA105", name="lease-rebound", severity=Severity.ERROR)
BAD = """\
def mean(pool, xs):
    out = pool.allocate(xs[0].shape, zero=True)
    for x in xs:
        out.add_(x)
    out = out / len(xs)
    return out
"""
GOOD = """\
def mean(pool, xs):
    out = pool.allocate(xs[0].shape, zero=True)
    for x in xs:
        out.add_(x)
    out.div_(len(xs))
    return out
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        for leak in lease.leaks:
            if leak.loss in (Loss.REBOUND, Loss.DELETED):
                how = "deleted" if leak.loss is Loss.DELETED else "bound to something else"
                name = leak.holder or lease.holder
                message = f"`{name}`, the only name of `{lease.text}`, is {how} at line {leak.at.line}"
                yield META.finding(lease.span, lease.symbol, message, leak.trace)
                break


def fix(case: Case) -> FixOffer | None:
    return kept_by_name(case)
