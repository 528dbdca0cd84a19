"""What adopting the pool, or finishing it, would cost a class: the number of places to edit."""

from collections.abc import Sequence

from auditor.project.pool_call import PoolCall, outside_of_wrappers
from auditor.source.entries import ClassIndex

_ADOPTING = 4  # the import, the base class, the parameters of `__init__`, the mixin's initialisation
_TEMPORARY = 2  # where it is allocated and where it is given back


def edits(entry: ClassIndex, support: str, calls: Sequence[PoolCall]) -> int | None:
    """None where nothing is to be done: support is full, or nothing that it allocates may be pooled."""
    beside = set(entry.detail.fallbacks) if entry.detail else set()
    temporaries = sum(each.temporary and each.span not in beside for each in entry.allocations)
    if support == "none":
        return _ADOPTING + (not entry.has_init) + _TEMPORARY * temporaries if temporaries else None
    if support == "full":
        return None
    unreleased = sum(not call.releases for call in outside_of_wrappers(calls)) if not entry.releases else 0
    cleanup = int(entry.keeps_leases and not entry.cleans_up)
    return unreleased + cleanup + _TEMPORARY * temporaries or None
