"""PA201 released-twice: a lease is given back a second time.

**What.** On some path the same lease reaches a release twice: by another name, in another method, by the
caller and by the callee, in a loop's next turn, or by the end of a `with` that gives it back as well. So it
is if a method that releases a field and keeps it is called twice, or is called by `__del__` as well, and if
something is released that another call took over (`transfer` in the settings: `os.fdopen(fd)`).

**Why.** After the first release the block is somebody else's, or soon will be. The second one puts it on
the free list twice, and then two owners write into the same memory: wrong results far away, at a load that
no test has. A pool that checks raises instead, in production, on the path nobody tried.

**Not reported.** A name that was bound to something new, a field that was set to None, releases under
conditions that exclude each other, a new acquire between, pools whose release ignores what they do not
hold, counts that are taken down as often as they were taken up, and tests of the failure itself.

**Example.** A `finally` that releases what a handler has released:

```python
def scores(pool, q, k):
    work = pool.allocate((q.shape[0], k.shape[0]))
    try:
        work.copy_(q @ k.T)
        return float(work.sum())
    except RuntimeError:
        pool.deallocate(work)
        raise
    finally:
        pool.deallocate(work)   # after the handler the second time
```

**Fix.** Unsafe: one of two releases in the same words and function is deleted, the later one where it always
comes after the earlier, else the earlier one where the later always follows. In other cases leave one of the
two by hand, or set the name to None after the first and test it before the second."""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, Fault
from auditor.fixes.second_release import without_second_release
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA201", name="released-twice", severity=Severity.ERROR)
BAD = """def double(pool, early):
    buf = pool.allocate(8)
    buf.zero_()
    if early:
        pool.deallocate(buf)
    pool.deallocate(buf)
"""
GOOD = """def once(pool, early):
    buf = pool.allocate(8)
    if early:
        pool.deallocate(buf)
        return
    pool.deallocate(buf)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.TWICE:
            message = f"{misuse.lease} is released a second time"
            yield META.finding(misuse.span, misuse.symbol, message, misuse.trace)


def fix(case: Case) -> FixOffer | None:
    return without_second_release(case)
