"""PA202 used-after-release: a lease is read or written after it has been given back.

**What.** After its release the lease, an alias or a view of it enters an operation, is written into, passed
to a function that uses it, or returned.

**Why.** The block may already be another request's. The read gives that request's values, the write
destroys them, and which of the two happens depends on the load. With a pool that waits until the last alias
has died the values are still there; the code is wrong all the same, and breaks with the next pool.

**Not reported.** Reading the shape, type or size; a name that was bound to something new; numbers of blocks
and slots, which stay numbers; functions that are given it and do nothing with it.

**Example.** The sum comes too late:

```python
def total(pool, x):
    work = pool.allocate(x.shape)
    work.copy_(x)
    pool.deallocate(work)
    return work.sum()   # of whatever is in the block by now
```

**Fix.** None yet. Move the release behind the last use, or keep a copy."""

from collections.abc import Iterator

from auditor.facts import Facts, Fault
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA202", name="used-after-release", severity=Severity.ERROR)
BAD = """def total(pool, x):
    work = pool.allocate(x.shape)
    work.copy_(x)
    pool.deallocate(work)
    return work.sum()
"""
GOOD = """def total(pool, x):
    with pool.lease(x.shape) as work:
        work.copy_(x)
        return work.sum()
"""


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.USED:
            message = f"{misuse.lease} is used after its release"
            yield META.finding(misuse.span, misuse.symbol, message, misuse.trace)
