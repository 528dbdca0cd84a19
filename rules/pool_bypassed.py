"""PA305 pool-bypassed: a class that takes tensors from its pool makes another large temporary beside it.

What: a module acquires from a pool, and on its forward path it makes a large temporary with plain torch
(`torch.zeros`, `torch.empty`, ...). Large and temporary mean what they mean for PA302: quadratic in a
length of the input, three or more sizes multiplied or 16 MiB by constants, and neither leaving the method
nor kept by autograd.

Why: the class pays for the pool's complexity, and its largest moment is still outside of it. It is usually
an allocation that was added after the class had been pooled.

Not reported: allocations where the pool is absent or not worth asking (in the other branch of an acquire,
under a condition about the pool, a threshold, gradients, compilation), those inside the class's own
allocating methods, a name that another branch takes from the pool, tensors that leave the method.

Example:
    def forward(self, q, k):
        b, n, h, d = q.shape
        with self._lease_tensor((b, h, n, n), q.dtype) as scores:
            mask = torch.zeros(b, h, n, n)             # as large as the scores, and not from the pool
            ...

Fix: take it from the pool as the others are. `fix` does it for classes with `MemoryPoolMixin`; unsafe,
because the memory comes from elsewhere.

In the field: nothing in 20,000 files of 19 public packages, true or false; its fixtures are all that shows
it at work. It is on because it is quiet (docs/field-notes-integration.md).
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA305", name="pool-bypassed", severity=Severity.INFO)

_CLASS = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.memory_pool = pool

    def forward(self, q, k, out):
        b, n, h, d = q.shape
        scores = self.memory_pool.allocate((b, h, n, n))
        try:
"""

BAD = (
    _CLASS
    + """\
            bias = torch.zeros(b, h, n, n)
            torch.matmul(q, k, out=scores)
            out.copy_(torch.add(scores, bias).sum())
        finally:
            self.memory_pool.deallocate(scores)
        return out
"""
)

GOOD = (
    _CLASS
    + """\
            bias = self.memory_pool.allocate((b, h, n, n), zero=True)
            try:
                torch.matmul(q, k, out=scores)
                out.copy_(torch.add(scores, bias).sum())
            finally:
                self.memory_pool.deallocate(bias)
        finally:
            self.memory_pool.deallocate(scores)
        return out
"""
)


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.pooled:
        for made in each.bypasses:
            yield META.finding(
                made.span,
                each.entry.qualname,
                f"`{each.entry.name}` uses a pool, and makes {made.operation}({made.shape}), "
                f"{made.bytes} bytes, beside it: {made.reason}",
            )


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.bypasses import through_mixin  # only where there is a finding

    return through_mixin(case)
