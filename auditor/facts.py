"""All that a rule may see: computed once, by name, read-only."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from auditor.flow.lease import EXCEPTIONAL, Callers, Field, Leak, Lease, Loss, StoredField
from auditor.flow.misuse import Fault, Misuse
from auditor.model import Step
from auditor.project.adoption.pool_call import PoolCall, outside_of_wrappers
from auditor.project.adoption.pooled_class import PooledClass
from auditor.project.adoption.repeats import Repeat
from auditor.project.adoption.standard import Standard
from auditor.source.entries import ClassIndex, FileIndex, LargeAllocation, PoolImport
from auditor.source.lifetime.sighting import Kind, Sighting
from auditor.source.suppress import Suppression

__all__ = [
    "EXCEPTIONAL",
    "LEAVING",
    "Callers",
    "ClassIndex",
    "Facts",
    "Fault",
    "Field",
    "FileIndex",
    "Kind",
    "LargeAllocation",
    "Leak",
    "Lease",
    "Loss",
    "Misuse",
    "PoolCall",
    "PoolImport",
    "PooledClass",
    "Repeat",
    "Sighting",
    "Standard",
    "StoredField",
    "Suppression",
    "kept",
    "named",
    "outside_of_wrappers",
]


@dataclass(frozen=True, slots=True)
class Facts:
    """The project as rules see it; every tuple is sorted by path and line."""

    leases: tuple[Lease, ...] = ()
    misuses: tuple[Misuse, ...] = ()  # what is wrong with leases besides their loss
    files: tuple[FileIndex, ...] = ()
    modules_without_pool: tuple[
        ClassIndex, ...
    ] = ()  # allocate large tensors on the forward path, pool at hand
    pooled: tuple[PooledClass, ...] = ()  # classes that use a pool, pools themselves left out
    pool_has_threshold: bool = False  # some pool or mixin of the project knows what is too small for it
    repeated_allocators: tuple[Repeat, ...] = ()
    standard: Standard = field(default_factory=Standard)
    suppressions: tuple[Suppression, ...] = ()  # with what each of them silenced

    def sightings(self, kind: Kind) -> Iterator[Sighting]:
        """What may outlive its use in this way, in every file but tests."""
        wrappers = [
            each.what for file in self.files for each in file.sightings if each.kind is Kind.CACHE_WRAPPED
        ]
        for file in self.files:
            for each in file.sightings:
                if each.kind is kind and (not each.needs or _is_any_of(each.needs, wrappers)):
                    yield each


def _is_any_of(name: str, known: list[str]) -> bool:
    """Whether a dotted name is one of `known`, which may start further up: at the audited folder."""
    return any(each == name or each.endswith(f".{name}") for each in known)


LEAVING = frozenset({Loss.RETURN, Loss.FALL_THROUGH, Loss.NEXT_TURN})
"""Losses on an ordinary way out of the function or of one turn of a loop."""


def named(lease: Lease) -> str:
    """The lease as a message calls it."""
    return f"`{lease.holder}`" if lease.holder and not lease.holder.startswith("%") else "the lease"


def kept(lease: Lease, stored: StoredField) -> tuple[Step, ...]:
    """From the acquire to the field, and to where the field's entries are dropped."""
    steps = [Step(lease.span.path, lease.span.line, lease.span.column, "acquired here")]
    if stored.at.line != lease.span.line:
        name = stored.field.written
        steps.append(Step(stored.at.path, stored.at.line, stored.at.column, f"kept in `{name}`"))
    for drop in stored.drops[:3]:
        how = "taken out here" if drop.trace else "dropped here, not released"
        steps += [Step(drop.at.path, drop.at.line, drop.at.column, how), *drop.trace[1:]]
    return tuple(dict.fromkeys(steps))  # `table.pop(key)` drops an entry, and loses what it returns
