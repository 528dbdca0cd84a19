"""PA301 unused-pool-import: a memory pool is imported and never used.

What: a module or name whose name contains `memory_pool` or `MemoryPool` is imported, and nothing in the
file mentions it.

Why: an import without use is usually half of a change. Someone meant this file to take its buffers from
the pool, the imports were written, the calls were not, and every review since has read the import and
believed that the file pools. A pool that is really not wanted here costs its import time and its module-
level state for nothing.

Not reported: re-exports (`__init__.py`, `__all__`, `import X as X`), imports that only ask whether
something is installed (`try: ... except ImportError`), names used in annotations, in strings of
annotations, or as a test's fixture, and imports that say so themselves (`# noqa: F401`).

Example:
    from project.memory_pool import get_global_memory_pool

class Attention(nn.Module): def forward(self, q, k, v): return torch.empty(q.shape) # the pool was
imported for this

Fix: use the pool where the file allocates, or delete the import (`fix --unsafe-fixes` does: importing a
module runs it, so that deleting is not provably without effect).
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts
from auditor.fixes.unused_import import without_import
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA301", name="unused-pool-import", severity=Severity.WARNING)

BAD = """\
from project.memory_pool import MemoryPool


def scores(q, k):
    return q @ k.mT
"""

GOOD = """\
from project.memory_pool import MemoryPool

pool = MemoryPool()


def scores(q, k):
    with pool.lease((q.shape[0], k.shape[0]), zero=True) as out:
        return (q @ k.mT).add_(out)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for file in facts.files:
        for each in file.pool_imports:
            if not each.used:
                yield META.finding(
                    each.span,
                    each.name,
                    f"`{each.name}` is imported from `{each.module}` and never used in this file",
                )


def fix(case: Case) -> FixOffer | None:
    return without_import(case)
