"""PA303 support-incomplete: a class takes from the pool and has no way to give back.

What: a module, or a class with a pool switch, acquires leases that it loses or keeps on self, and neither
it nor a base or subclass of it calls anything that releases; or it keeps a lease on self that is given
back only while the object works (when it is taken anew), and no cleanup method gives back the last one.

Why: half of an adoption is worse than none. The pool counts these leases as held for as long as the
process lives, so its memory only grows, and whoever reads the class believes that it is pooled. The single
acquires are reported by PA1 rules; this one says that the class was never finished.

Not reported: classes that only hand leases on (returned, yielded, given to somebody who keeps them), or get
one from a method that promises none (`super().forward(...)`: its class is reported), classes whose base or
subclass releases, leases that other objects are handed or release, leases taken in a `with`, containers whose
entries come and go with requests, classes that are neither modules nor switched (the PA1 rules speak of their
acquires), and pools themselves.

Example:
    class Attention(MemoryPoolMixin, nn.Module):
        def forward(self, q, k):
            scores = self._allocate_tensor((len(q), len(k)), q.dtype)
            return torch.matmul(q, k.mT, out=scores).softmax(-1) @ k    # never `_deallocate_tensor`

Fix: release what the forward pass takes (`with self._lease_tensor(...)`), and give the class a `close` or
`cleanup_memory_pool` for what it keeps. Unsafe: the class becomes an owner.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import LEAVING, Facts, Lease, PooledClass, kept, outside_of_wrappers
from auditor.model import Finding, FixOffer, Severity, Step
from auditor.rule import Meta

META = Meta(code="PA303", name="support-incomplete", severity=Severity.WARNING)

BAD = """\
class Scores:
    def __init__(self, pool, enable_memory_pool: bool = False, memory_pool_threshold_mb: float = 16.0):
        self.pool = pool if enable_memory_pool else None
        self.threshold = memory_pool_threshold_mb

    def total(self, n):
        work = self.pool.allocate((n, n))
        work.zero_()
        return work.sum() + 1
"""

GOOD = """\
class Scores:
    def __init__(self, pool, enable_memory_pool: bool = False, memory_pool_threshold_mb: float = 16.0):
        self.pool = pool if enable_memory_pool else None
        self.threshold = memory_pool_threshold_mb

    def total(self, n):
        work = self.pool.allocate((n, n))
        try:
            return work.zero_().sum() + 1
        finally:
            self.pool.deallocate(work)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.pooled:
        if not (each.entry.is_module or each.entry.switch is not None):
            continue
        found = _never_released(each) or _no_cleanup(each)
        if found is not None:
            message, lease, trace = found
            yield META.finding(each.entry.span, each.entry.qualname, f"{message}: `{lease.text}`", trace)


Found = tuple[str, Lease, tuple[Step, ...]]


def _never_released(each: PooledClass) -> Found | None:
    if each.releases:
        return None
    own = {call.span for call in outside_of_wrappers(each.calls)}
    for lease in each.leases:
        if lease.span not in own:
            continue
        if any(leak.loss in LEAVING for leak in lease.leaks) and not (lease.released or lease.handed_over):
            return f"`{each.entry.name}` acquires, and nothing in it releases", lease, _acquired(lease)
        for stored in lease.fields:
            if not (stored.released_by or stored.escapes):
                return (
                    f"`{each.entry.name}` keeps a lease, and nothing in it releases",
                    lease,
                    kept(lease, stored),
                )
    return None


def _no_cleanup(each: PooledClass) -> Found | None:
    """Kept in a plain field, released in service by the class itself, and by no cleanup."""
    for lease in each.leases:
        for stored in lease.fields:
            if "[" in stored.field.path or stored.escapes or not stored.released_by or stored.cleanups:
                continue
            own = f"{each.entry.qualname}."
            if all(name.startswith(own) for name in stored.released_by):
                message = f"`{each.entry.name}` has no cleanup that gives back `self.{stored.field.path}`"
                return message, lease, kept(lease, stored)
    return None


def _acquired(lease: Lease) -> tuple[Step, ...]:
    return (Step(lease.span.path, lease.span.line, lease.span.column, "acquired here"),)


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.cleanups import completed  # only where there is a finding

    return completed(case)
