"""PA402 pool-on-by-default: a class turns its pool on unless told otherwise, against the project's standard.

What: a boolean `__init__` parameter whose name contains `memory_pool` has the default True, and the
project's standard is off. The standard is `default` in `[tool.poolaudit.standard]`; where the settings
say nothing it is what most classes with such a switch have. Where on and off are equally many there is no
standard.

Why: a pool changes when memory is held and for how long. Where most of a project asks for it to be turned
on, whoever builds this class gets it unasked, and a measurement of "without the pool" is not one.

Not reported: projects whose standard is on, or that have none; parameters without a default; defaults of
None.

Example:
    class RingAttention(nn.Module):
        def __init__(self, *, enable_memory_pool: bool = True): ...     # all others: False

Fix: `= False`, and turn it on where it is wanted. Unsafe: whoever builds the class without a word gets
no pool.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA402", name="pool-on-by-default", severity=Severity.INFO)

_CLASS = """\
class {name}:
    def __init__(self, pool, enable_memory_pool: bool = {default}):
        self.pool = pool if enable_memory_pool else None


"""


def _example(*defaults: bool) -> str:
    return "".join(_CLASS.format(name=f"Part{at}", default=value) for at, value in enumerate(defaults))


BAD = _example(False, False, True)
GOOD = _example(False, False, False)


def check(facts: Facts) -> Iterator[Finding]:
    if facts.standard.default is not False:
        return
    for each in facts.pooled:
        entry = each.entry
        if each.declares_switch and entry.switch_default is True:
            yield META.finding(
                each.switch_span or entry.span,
                f"{entry.qualname}.__init__",
                f"`{entry.name}` has `{entry.switch}` on by default; {facts.standard.says('default')} off",
            )


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.switches import off_by_default  # only where there is a finding

    return off_by_default(case)
