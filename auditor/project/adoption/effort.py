"""What adopting the pool, or finishing it, would cost a class: the number of places to edit."""

from collections.abc import Sequence

from auditor.project.adoption.pool_call import PoolCall, outside_of_wrappers
from auditor.source.entries import ClassIndex

_ADOPTING = 3  # the import, the base class, a constructor of its own
_TEMPORARY = 1  # a `with` around its life


def edits(entry: ClassIndex, support: str, calls: Sequence[PoolCall]) -> int | None:
    """None where nothing is to be done: support is full, or nothing that it allocates may be pooled.

    For a class without a pool that is what its index tells; `auditor.adopt.effort` asks the codemod.
    """
    beside = set(entry.detail.fallbacks) if entry.detail else set()
    temporaries = sum(each.temporary and each.span not in beside for each in entry.allocations)
    if support == "none":
        # one that is there is edited twice: parameters and initialisation
        return _ADOPTING + entry.has_init + _TEMPORARY * temporaries if temporaries else None
    if support == "full":
        return None
    unreleased = sum(not call.releases for call in outside_of_wrappers(calls)) if not entry.releases else 0
    cleanup = int(entry.keeps_leases and not entry.cleans_up)
    return unreleased + cleanup + _TEMPORARY * temporaries or None
