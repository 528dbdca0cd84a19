"""PA403 non-standard-switch: a class names its pool switch otherwise than the project does.

What: a boolean `__init__` parameter whose name contains `memory_pool` is not called what the project's
standard says: `switch` in `[tool.poolaudit.standard]`, or, where the settings say nothing, the name that
more than half of the classes with a switch, and at least three, have.

Why: a caller that hands `enable_memory_pool` down through `**kwargs`, or a config that sets it by name,
does not reach a class that calls it `use_memory_pool`: that is an error at best, and silence at worst.

Not reported: projects without a standard; inherited switches, which are reported where they are declared.

Example:
    class BlockAttention(nn.Module):
        def __init__(self, use_memory_pool: bool = False): ...      # all others: enable_memory_pool

Fix: rename the parameter, and its callers' keyword, in the whole project; not where the name also stands in a
string, for then something may ask for it by that. Unsafe: callers outside of the project use the old name.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA403", name="non-standard-switch", severity=Severity.INFO)

_CLASS = """\
class {name}:
    def __init__(self, pool, {switch}: bool = False):
        self.pool = pool if {switch} else None


"""


def _example(*switches: str) -> str:
    return "".join(_CLASS.format(name=f"Part{at}", switch=each) for at, each in enumerate(switches))


BAD = _example("enable_memory_pool", "enable_memory_pool", "enable_memory_pool", "use_memory_pool")
GOOD = _example("enable_memory_pool", "enable_memory_pool", "enable_memory_pool", "enable_memory_pool")


def check(facts: Facts) -> Iterator[Finding]:
    wanted = facts.standard.switch
    if wanted is None:
        return
    for each in facts.pooled:
        entry = each.entry
        if each.declares_switch and entry.switch != wanted:
            yield META.finding(
                each.switch_span or entry.span,
                f"{entry.qualname}.__init__",
                f"`{entry.name}` calls its switch `{entry.switch}`; "
                f"{facts.standard.says('switch')} `{wanted}`",
            )


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.renames import renamed_switch  # only where there is a finding

    wanted = case.facts.standard.switch
    span, path = case.finding.span, case.finding.span.path
    for each in case.facts.pooled:
        if each.switch_span == span and each.entry.span.path == path and each.entry.switch and wanted:
            return renamed_switch(case, each.entry.switch, wanted)
    return None
