"""PA205 released-under-autograd: a lease goes back to its pool while a graph still keeps it for backward.

**What.** The lease, or a view of it, entered an operation that keeps this input for its backward pass,
gradients were being recorded, something that needs a gradient took part, and the result was still alive at
the release.

**Why.** The backward pass reads the block after its next owner has written it. torch compares version
counters of tensors, not blocks of pools, so nothing raises: the gradients are wrong, and only under load.
(A pool that waits until the last reference has died is safe, and holds the block until the backward pass:
the release gained nothing.)

**Not reported.** Code under `no_grad`, `inference_mode` or in the `forward` of an autograd Function;
operations that keep nothing or their result only (`add`, `sum`, `softmax`, `exp`); operands without
gradients; results that were detached or turned into numbers; a release after `backward()`.

**Example.** The product keeps both factors:

```python
def scaled(pool, x, weight):
    work = pool.allocate(x.shape)
    work.copy_(x)
    out = work * weight
    pool.deallocate(work)   # backward needs `work` for the gradient of `weight`
    return out
```

**Fix.** None yet. Release after the backward pass, or put the computation into a custom Function that
computes its own gradient from what outlives it."""

from collections.abc import Iterator

from auditor.facts import Facts, Fault
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA205", name="released-under-autograd", severity=Severity.WARNING)
BAD = """def scaled(pool, x, weight):
    work = pool.allocate(x.shape)
    work.copy_(x)
    out = work * weight
    pool.deallocate(work)
    return out
"""
GOOD = """import torch

def scaled(pool, x, weight):
    with torch.no_grad(), pool.lease(x.shape) as work:
        work.copy_(x)
        return work * weight
"""

WORDS = {"Mult": "a product", "MatMult": "a matrix product", "Div": "a quotient", "Pow": "a power"}


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.GRAPH:
            keeping = ", ".join(WORDS.get(name, f"`{name}`") for name in misuse.why.split(", "))
            message = f"{misuse.lease} is released while {keeping} keeps it for the backward pass"
            yield META.finding(misuse.span, misuse.symbol, message, misuse.trace)
