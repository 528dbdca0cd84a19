"""PA108 callers-lose-lease: a public function hands its lease to callers of whom none releases it.

## What
The function returns what it acquired, so its callers owe the release. The tree has several callers,
and every one of them loses it. A single one is told at its own call.

## Why
When all callers are wrong the interface is: nothing tells them that the result is a lease. The trace
lists them.

## Example
See below: one caller keeps a copy and drops the lease, the other keeps nothing.

## Fix
safety
None: decide whether the function should return a copy or be a context manager.
"""

from collections.abc import Iterator

from auditor.facts import Facts
from auditor.model import Finding, Severity, Step
from auditor.rule import Meta

META = Meta(code="PA108", name="callers-lose-lease", severity=Severity.WARNING)
BAD = """\
class Attention:
    def forward(self, x):
        out = self.pool.allocate(x.shape)
        out.copy_(x)
        return out


def evaluate(x):
    attention = Attention()
    y = attention.forward(x)
    return y.clone()


def warm_up(attention: Attention, batches):
    for x in batches:
        attention.forward(x).sum()
"""
GOOD = """\
class Attention:
    def forward(self, x):
        out = self.pool.allocate(x.shape)
        out.copy_(x)
        return out


def evaluate(x):
    attention = Attention()
    y = attention.forward(x)
    try:
        return y.sum()
    finally:
        attention.pool.deallocate(y)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        callers = lease.callers
        if callers is not None and callers.known > 1 and len(callers.losing) == callers.known:
            whom = f"none of its {callers.known} known callers releases it"
            message = f"`{lease.symbol}` returns `{lease.text}`, and {whom}"
            first = Step(
                lease.span.path, lease.span.line, lease.span.column, "acquired here, returned to the caller"
            )
            yield META.finding(lease.span, lease.symbol, message, (first, *callers.losing))
