"""What a project calls its pool's parts, for people: the standard, the switches, imports without use."""

from collections import Counter
from collections.abc import Iterable, Sequence

from auditor.model import Conventions, SwitchUse
from auditor.project.adoption.pool_call import outside_of_wrappers
from auditor.project.adoption.pooled_class import PooledClass
from auditor.project.adoption.standard import Standard
from auditor.source.entries import FileIndex


def conventions(files: Iterable[FileIndex], pooled: Sequence[PooledClass], names: Standard) -> Conventions:
    return Conventions(
        acquire=names.acquire,
        release=names.release,
        switch=names.switch,
        default=names.default,
        declared=tuple(sorted(names.declared)),
        other_acquires=_others(pooled, names.acquire, releases=False),
        other_releases=_others(pooled, names.release, releases=True),
        switches=_switches(pooled),
        unused_imports=tuple(
            f"{file.path}:{each.span.line} {each.name}"
            for file in files
            for each in file.pool_imports
            if not each.used
        ),
    )


def _switches(pooled: Sequence[PooledClass]) -> tuple[SwitchUse, ...]:
    """By name, the most frequent first; each class counts that declares one."""
    found: dict[str, Counter[bool | None]] = {}
    for each in pooled:
        if each.declares_switch and each.entry.switch is not None:
            found.setdefault(each.entry.switch, Counter())[each.entry.switch_default] += 1
    uses = [SwitchUse(name, seen[True], seen[False], seen[None]) for name, seen in found.items()]
    return tuple(sorted(uses, key=lambda use: (-(use.on + use.off + use.undecided), use.name)))


def _others(pooled: Sequence[PooledClass], wanted: str | None, *, releases: bool) -> tuple[str, ...]:
    """The names that differ from the standard, if there is one."""
    calls = (call for each in pooled for call in outside_of_wrappers(each.calls))
    return tuple(
        sorted(
            {call.name for call in calls if call.releases is releases and call.name != wanted}
            if wanted
            else ()
        )
    )
