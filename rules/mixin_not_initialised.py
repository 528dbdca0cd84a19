"""PA307 mixin-not-initialised: a constructor skips the one that sets up the pool's state.

What: a class inherits methods that read a field of the pool (`self._pool`), a base sets that field in its
`__init__` or in a private `_init_...` method, and the class's own `__init__` reaches neither: it calls no
`super().__init__()`, or not the method that the mixin needs called.

Why: the object is built without an error. The first forward pass that asks the pool raises AttributeError,
and if that attribute is only read in a cleanup, the cleanup does.

Not reported: fields with a default in the class's body, fields that another method sets when first
needed, classes whose subclasses finish the construction, abstract classes, bases outside of the project,
fields that are read only by `getattr` or `hasattr`.

Example:
    class Attention(PooledModule):
        def __init__(self, dim):
            nn.Module.__init__(self)               # PooledModule.__init__ sets self._pool
            self.dim = dim

Fix: call `super().__init__(...)`, or the mixin's own initialiser.

In the field: one finding in 20,000 files of 19 public packages, a stand-in for tests, and such are left alone
since. Its fixtures are all that shows it at work (docs/field-notes-integration.md).
"""

from collections.abc import Iterator

from auditor.facts import Facts
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA307", name="mixin-not-initialised", severity=Severity.ERROR)

_MIXIN = """\
class PoolMixin:
    def __init__(self, memory_pool):
        self._memory_pool = memory_pool

    def scratch(self, shape):
        return self._memory_pool.lease(shape)


"""

BAD = (
    _MIXIN
    + """\
class Scores(PoolMixin):
    def __init__(self, memory_pool, size):
        self.size = size

    def total(self):
        with self.scratch((self.size,)) as work:
            return float(work.zero_().sum())
"""
)

GOOD = (
    _MIXIN
    + """\
class Scores(PoolMixin):
    def __init__(self, memory_pool, size):
        super().__init__(memory_pool)
        self.size = size

    def total(self):
        with self.scratch((self.size,)) as work:
            return float(work.zero_().sum())
"""
)


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.pooled:
        detail, missing = each.entry.detail, each.missing
        if missing is not None and detail is not None and detail.init_span is not None:
            yield META.finding(
                detail.init_span,
                f"{each.entry.qualname}.__init__",
                f"`{each.entry.name}.__init__` never reaches `{missing.owner}.{missing.setter}`, which sets "
                f"`self.{missing.attribute}`; `{missing.reader}` reads it",
            )
