"""PA203 foreign-release: a pool is given what no pool handed out.

**What.** A tensor that was surely made here (by torch, by arithmetic, by a copy) reaches a pool's release,
directly or through a function that releases what it is given. If every caller of that function passes such
a tensor, its release is reported, else the calls that do.

Locks and semaphores are looked at where their protocol is on (`enable-protocols = ["locks"]`): a release that
some path reaches without the acquire, because that stands within the `try`, was not waited for, or belongs
to another branch. A function that may be entered with the lock held is left alone.

**Why.** The pool takes the memory in and hands it out as its own while its maker still uses it, or it
raises. Often the other half of the fault stands beside it: the lease that should have come back never does,
because its name was bound to a new tensor on the way (`out = out / n`).

**Not reported.** Parameters whose callers are not known, what comes out of containers and unknown calls,
and pools that are filled this way (`put`, `push`) or take in what they do not know.

**Example.** What is released is the quotient, not the lease:

```python
def average(pool, parts):
    total = pool.allocate(parts[0].shape, zero=True)
    for part in parts:
        total += part
    total = total / len(parts)   # a new tensor; the lease has lost its name
    mean = float(total.mean())
    pool.deallocate(total)
    return mean
```

**Fix.** None yet. Work in place (`total /= n`), or keep the lease under a name of its own."""

from collections.abc import Iterator

from auditor.facts import Facts, Fault, Misuse
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA203", name="foreign-release", severity=Severity.WARNING)
BAD = """import torch

def total(pool, n):
    scratch = torch.ones(n)
    result = scratch.sum()
    pool.deallocate(scratch)
    return result
"""
GOOD = """def total(pool, n):
    with pool.lease(n, zero=True) as scratch:
        return scratch.sum()
"""


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.FOREIGN:
            yield META.finding(misuse.span, misuse.symbol, _message(misuse), misuse.trace)


def _message(misuse: Misuse) -> str:
    if misuse.why == "lock":
        return f"{misuse.lease} is released where it may not have been taken"
    whose = "every caller passes a tensor that" if misuse.why == "caller" else misuse.lease
    return f"{whose} was never acquired from a pool"
