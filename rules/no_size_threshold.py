"""PA306 no-size-threshold: a pooled class asks the pool for tensors of every size.

What: a class declares a pool switch and acquires, and neither it nor a base names a size below which it
uses plain memory (`threshold`, `min_size`, `min_bytes`, `min_numel`, ...); nor does any pool of the
project.

Why: a small allocation from plain torch costs about a microsecond, less than most pools need for their
bookkeeping, and a pool full of small blocks is fragmented. On CPU reuse pays from some megabytes on.

Off by default: whether a threshold is missing depends on the pool, and one that was brought from elsewhere
may have its own. Turn it on where the project's pools are its own: `--select PA306`. What the threshold
should be is `threshold-mb` in `[tool.poolaudit.standard]`.

Not reported: classes without a switch of their own, classes that only hand the switch on, projects one of
whose pools or mixins has a threshold.

Example:
    class Attention(nn.Module):
        def __init__(self, enable_memory_pool: bool = False): ...
        def forward(self, x):
            scale = self.pool.allocate((x.shape[-1],))      # a few hundred bytes

Fix: give the class `memory_pool_threshold_mb`, or the pool a threshold of its own.
"""

from collections.abc import Iterator

from auditor.facts import Facts
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA306", name="no-size-threshold", severity=Severity.INFO, default=False)

BAD = """\
class Scores:
    def __init__(self, pool, enable_memory_pool: bool = False):
        self.pool = pool if enable_memory_pool else None

    def total(self, n):
        with self.pool.lease((n, n)) as work:
            return float(work.zero_().sum())
"""

GOOD = """\
class Scores:
    def __init__(self, pool, enable_memory_pool: bool = False, memory_pool_threshold_mb: float = 16.0):
        self.pool = pool if enable_memory_pool else None
        self.threshold = memory_pool_threshold_mb

    def total(self, n):
        with self.pool.lease((n, n), threshold_mb=self.threshold) as work:
            return float(work.zero_().sum())
"""


def check(facts: Facts) -> Iterator[Finding]:
    if facts.pool_has_threshold:
        return
    wanted = facts.standard.threshold_mb
    advice = f" (the standard is {wanted:g} MB)" if wanted is not None else ""
    for each in facts.pooled:
        if each.declares_switch and each.acquires and not each.has_threshold:
            yield META.finding(
                each.entry.span,
                each.entry.qualname,
                f"`{each.entry.name}` asks its pool for tensors of every size: no threshold{advice}",
            )
