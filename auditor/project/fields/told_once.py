"""Leases that a helper puts into its argument: `if not self.take_bonus(state): return None`. What the helper
is told of them, for the same field, its callers are not told again."""

from collections.abc import Mapping, Sequence

from auditor.flow.lease import StoredField
from auditor.ir.ops import is_temporary
from auditor.project.code.calls import Calls
from auditor.project.outcome import Outcome


def told_where_it_is_put(
    outcomes: Sequence[Outcome], found: Mapping[int, tuple[StoredField, ...]], calls: Calls
) -> dict[int, tuple[StoredField, ...]]:
    """For each outcome (by id of its call) its fields, but for those of which its callee is told."""
    told = {
        (outcome.function, field.field.path)
        for outcome in outcomes
        for field in found.get(id(outcome.call), ())
        if _is_lost(field)
    }
    left = dict(found)
    for outcome in outcomes:
        fields = found.get(id(outcome.call), ())
        if not fields or not _lies_in_an_argument(outcome):
            continue
        targets = calls.targets(outcome.function, outcome.call)[0]
        left[id(outcome.call)] = tuple(
            field for field in fields if not any((target, field.field.path) in told for target in targets)
        )
    return left


def _is_lost(field: StoredField) -> bool:
    return bool(field.partly_by or field.drops or field.overwrite) or not field.released_by


def _lies_in_an_argument(outcome: Outcome) -> bool:
    place = outcome.acquisition.places[0]
    return len(place) > 1 and not is_temporary(place)
