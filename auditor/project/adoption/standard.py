"""The names a project standardises on: what its settings say, else what most of its classes do."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from auditor.config import StandardNames
from auditor.project.adoption.pool_call import PoolCall
from auditor.source.entries import ClassIndex

_FEWEST = 3  # classes that must agree; what two of three do by chance is no standard


@dataclass(frozen=True, slots=True)
class Standard:
    """None where neither the settings nor a majority says. `declared` names the parts that settings gave."""

    acquire: str | None = None
    release: str | None = None
    switch: str | None = None
    default: bool | None = None
    threshold_mb: float | None = None
    declared: frozenset[str] = frozenset()

    def says(self, part: str) -> str:
        """Where a part of the standard comes from, for a message."""
        return "the settings say" if part in self.declared else "most classes here say"


def standard(
    settings: StandardNames,
    classes: Sequence[ClassIndex],
    switched: Sequence[ClassIndex],
    calls: Mapping[tuple[str, str], Sequence[PoolCall]],
) -> Standard:
    """`classes` are a pool's users; `switched` those that declare a switch themselves."""
    declared = {name for name in StandardNames.__struct_fields__ if getattr(settings, name) is not None}
    return Standard(
        acquire=settings.acquire or _usual(_own_names(classes, calls, releases=False)),
        release=settings.release or _usual(_own_names(classes, calls, releases=True)),
        switch=settings.switch or _usual({each.switch} for each in switched if each.switch),
        default=_usual_default(switched) if settings.default is None else settings.default,
        threshold_mb=settings.threshold_mb,
        declared=frozenset(declared),
    )


def _own_names(
    classes: Iterable[ClassIndex],
    calls: Mapping[tuple[str, str], Sequence[PoolCall]],
    *,
    releases: bool,
) -> list[set[str]]:
    """Of each class the words for its own methods: a pool object's method is named by the pool."""
    found = []
    for each in classes:
        made = calls.get((each.span.path, each.qualname), ())
        names = {call.name for call in made if call.on_self and call.speaks and call.releases is releases}
        if names:
            found.append(names)
    return found


def _usual(ballots: Iterable[set[str]]) -> str | None:
    """The name that more than half of the voters use."""
    votes = list(ballots)
    counted = Counter(name for names in votes for name in names)
    for name, count in counted.most_common(1):
        if count >= _FEWEST and 2 * count > len(votes):
            return name
    return None


def _usual_default(switched: Sequence[ClassIndex]) -> bool | None:
    on = sum(each.switch_default is True for each in switched)
    off = sum(each.switch_default is False for each in switched)
    return None if on == off else on > off
