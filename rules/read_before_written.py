"""PA206 read-before-written: a lease that was handed out uncleared is read before anybody has written it.

**What.** The acquire does not clear what it hands out, and the first thing that happens to the values is a
read: a sum, a product, or an operation in place that builds on what is there (`+=`, `add_`, `index_add_`).
The same is said of memory that no pool handed out, where the first thing that happens to it in the function
is a read: `torch.empty`, `np.empty`, `x.new_empty(n)`, `torch.FloatTensor(8)`, and what a ufunc leaves out
(`np.log(x, where=x > 0)` without `out=`).

**Why.** A fresh block is often zero, because the system hands out cleared pages. A block that is used again
holds what its last owner left. So the code works in every test and is wrong in the second request.

**Not reported.** Leases acquired with `zero=True`, `zero_init=True` and the like, or where that depends on
a variable; a pool whose body clears; anything after a write, in part or whole, or after a call that may
write (a kernel, `out=`, a collective); shapes and sizes.

**Example.** The accumulator starts with somebody else's sum:

```python
def total(pool, parts):
    acc = pool.allocate(parts[0].shape)
    for part in parts:
        acc += part
    out = acc.clone()
    pool.deallocate(acc)
    return out
```

**Fix.** Unsafe: `zeros` instead of `empty` where torch or numpy made the memory. What was chance is zero
then, which may not be what was meant. For a lease none: acquire with `zero=True`, or begin with `copy_` of
the first part."""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, Fault, Kind
from auditor.fixes.cleared import made_cleared
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA206", name="read-before-written", severity=Severity.WARNING)
BAD = """def total(pool, parts):
    acc = pool.allocate(parts[0].shape)
    for part in parts:
        acc += part
    out = acc.clone()
    pool.deallocate(acc)
    return out
"""
GOOD = """def total(pool, parts):
    with pool.lease(parts[0].shape, zero=True) as acc:
        for part in parts:
            acc += part
        return acc.clone()
"""


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.UNWRITTEN:
            message = f"{misuse.lease} was acquired uncleared and is read before it is written"
            yield META.finding(misuse.span, misuse.symbol, message, misuse.trace)
    for seen in facts.sightings(Kind.UNWRITTEN):
        message = f"{seen.what} of `{seen.where}` is read before it is written"
        yield META.finding(seen.span, seen.symbol, message, seen.steps)


def fix(case: Case) -> FixOffer | None:
    return made_cleared(case)
