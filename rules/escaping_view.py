"""PA204 escaping-view: a view of a lease outlives its release.

**What.** A slice, a transpose or another view of a lease is returned, yielded or stored where it outlives
the function, and the lease has been given back: before, in a `finally`, or by the end of a `with`. An array
over the memory of an object is such a view: `np.frombuffer` of a map, `np.ndarray(buffer=segment.buf)`.

**Why.** The view looks at the block, not at the values. The caller reads whatever the next owner writes,
often much later, and nothing at that place says that the tensor was borrowed.

**Not reported.** Copies (`clone`, `contiguous` of a transpose, arithmetic, sums), and leases that are
handed over with their views instead of being released.

**Example.** The `finally` runs before the caller has the value:

```python
def column(pool, x):
    block = pool.allocate(x.shape)
    try:
        block.copy_(x)
        return block[:, 0]
    finally:
        pool.deallocate(block)
```

**Fix.** None yet. Return a copy (`block[:, 0].clone()`), or hand the lease itself over."""

from collections.abc import Iterator

from auditor.facts import Facts, Fault
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA204", name="escaping-view", severity=Severity.ERROR)
BAD = """def column(pool, x):
    block = pool.allocate(x.shape)
    block.copy_(x)
    first = block[:, 0]
    pool.deallocate(block)
    return first
"""
GOOD = """def column(pool, x):
    with pool.lease(x.shape) as block:
        block.copy_(x)
        return block[:, 0].clone()
"""


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.ESCAPED:
            message = f"a view of {misuse.lease} leaves the function, and the lease has been released"
            yield META.finding(misuse.span, misuse.symbol, message, misuse.trace)
