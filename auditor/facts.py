"""All that a rule may see: computed once, by name, read-only."""

from dataclasses import dataclass

from auditor.flow.lease import EXCEPTIONAL, Callers, Field, Leak, Lease, Loss, StoredField
from auditor.source.entries import ClassIndex, FileIndex, LargeAllocation, PoolImport
from auditor.source.suppress import Suppression

__all__ = [
    "EXCEPTIONAL",
    "Callers",
    "ClassIndex",
    "Facts",
    "Field",
    "FileIndex",
    "LargeAllocation",
    "Leak",
    "Lease",
    "Loss",
    "PoolImport",
    "StoredField",
    "Suppression",
]


@dataclass(frozen=True, slots=True)
class Facts:
    """The project as rules see it; every tuple is sorted by path and line."""

    leases: tuple[Lease, ...] = ()
    files: tuple[FileIndex, ...] = ()
    modules_without_pool: tuple[ClassIndex, ...] = ()  # allocate large tensors on the forward path, pool at hand
    suppressions: tuple[Suppression, ...] = ()  # with what each of them silenced
