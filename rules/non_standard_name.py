"""PA401 non-standard-name: a module acquires or releases by another name than the project's standard.

What: a module, or a class with a pool switch, calls an acquiring or releasing method that is not called
what the project calls it. The standard is `acquire` and `release` in `[tool.poolaudit.standard]`; where
the settings say nothing it is what more than half of at least three such classes call on themselves.

Why: reviewers look for the pair they know. `self._allocate_tensor` beside `self._get_buffer` beside
`self._alloc` in one project means that nobody can search for an acquire without its release.

Not reported: `lease` and other context managers, calls on pool objects where only a majority speaks (the
pool names its methods, not its user), the bodies of the methods that the class acquires or releases by,
methods that hand out a lease under a name that promises none (`self.scores(x)`), classes that are neither
modules nor have a switch.

Example:
    scores = self._get_buffer((b, h, n, n))        # everywhere else: self._allocate_tensor(...)

Fix: rename the method, or say in the settings what the standard is. `fix` renames every definition and
use of a class's own method in the project, or none: not where something else has that name, or the
standard one is taken, or the name stands in a string. Unsafe: callers outside of the project use the
old name.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts, PoolCall, PooledClass, Standard, outside_of_wrappers
from auditor.model import Finding, FixOffer, Severity
from auditor.rule import Meta

META = Meta(code="PA401", name="non-standard-name", severity=Severity.INFO)

_MODULE = """\
class {name}:
    def __init__(self, pool, enable_memory_pool: bool = False, memory_pool_threshold_mb: float = 16.0):
        self.pool = pool if enable_memory_pool else None
        self.threshold = memory_pool_threshold_mb

    def {acquire}(self, shape):
        return self.pool.allocate(shape)

    def forward(self, n):
        work = self.{acquire}((n, n))
        try:
            return float(work.zero_().sum())
        finally:
            self.pool.deallocate(work)


"""


def _example(*names: str) -> str:
    return "".join(_MODULE.format(name=f"Part{place}", acquire=name) for place, name in enumerate(names))


BAD = _example("_allocate_tensor", "_allocate_tensor", "_allocate_tensor", "_get_buffer")
GOOD = _example("_allocate_tensor", "_allocate_tensor", "_allocate_tensor", "_allocate_tensor")


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.pooled:
        if not (each.entry.is_module or each.entry.switch is not None):
            continue
        told: set[tuple[str, bool]] = set()
        for call in outside_of_wrappers(each.calls):
            wanted = _wanted(call, facts.standard)
            if wanted is not None and (call.name, call.releases) not in told:
                told.add((call.name, call.releases))
                yield _finding(each, call, wanted, facts.standard)


def _wanted(call: PoolCall, standard: Standard) -> str | None:
    """The standard name where the call has another one; None where it is right or there is no standard."""
    part = "release" if call.releases else "acquire"
    name = standard.release if call.releases else standard.acquire
    if name is None or name in (call.name, call.method) or "lease" in call.name.split("_"):
        return None
    return name if call.on_self or part in standard.declared else None


def _finding(each: PooledClass, call: PoolCall, wanted: str, standard: Standard) -> Finding:
    part = "release" if call.releases else "acquire"
    return META.finding(
        call.span,
        f"{each.entry.qualname}.{call.method}",
        f"`{each.entry.name}` {part}s by `{call.name}`; {standard.says(part)} `{wanted}`",
    )


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.renames import renamed_method  # only where there is a finding

    for each in case.facts.pooled:
        for call in each.calls:
            wanted = _wanted(call, case.facts.standard) if call.span == case.finding.span else None
            if wanted is not None and call.on_self:
                return renamed_method(case, call.name, wanted)
    return None
