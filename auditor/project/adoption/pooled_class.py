"""A class that uses a pool, with what the rest of the project makes of it: what the integration rules ask."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from auditor.flow.lease import Lease
from auditor.model import Span
from auditor.project.adoption.class_table import ClassTable
from auditor.project.adoption.initialised import MissingState, missing_state
from auditor.project.adoption.pool_call import PoolCall
from auditor.source.entries import ClassIndex, LargeAllocation

Key = tuple[str, str]  # path and qualified name


@dataclass(frozen=True, slots=True)
class Child:
    """A pooled object that `__init__` builds without handing the switch on."""

    name: str
    switch: str
    span: Span


@dataclass(frozen=True, slots=True)
class PooledClass:
    """`entry` is the class with what it inherits; `declares_switch` whether the switch is its own.

    `calls` and `leases` are its own; `releases` is whether it, a base or a subclass gives anything back.
    `bypasses` are its large temporaries that do not come from the pool and could.
    """

    entry: ClassIndex
    declares_switch: bool = False
    switch_span: Span | None = None
    calls: tuple[PoolCall, ...] = ()
    leases: tuple[Lease, ...] = ()
    releases: bool = False
    acquires: bool = False
    has_threshold: bool = False
    children: tuple[Child, ...] = ()
    bypasses: tuple[LargeAllocation, ...] = ()
    missing: MissingState | None = None


def pooled_classes(
    table: ClassTable, calls: Mapping[Key, Sequence[PoolCall]], leases: Mapping[Key, Sequence[Lease]]
) -> tuple[PooledClass, ...]:
    """Every class that acquires, releases, or declares or inherits something of a pool; no pool itself."""
    users = [each for each in table.classes() if each.detail is not None or key_of(each) in calls]
    heirs = _heirs(users, table)
    found = [_pooled(each, table, calls, leases, heirs) for each in users]
    return tuple(sorted(filter(_is_user, found), key=lambda each: each.entry.span))


def _is_user(found: PooledClass) -> bool:
    """A module with allocating methods of its own is still a user; other classes that have them are pools."""
    return found.entry.is_module or not found.entry.defines_pool


def key_of(entry: ClassIndex) -> Key:
    return entry.span.path, entry.qualname


def _heirs(users: Sequence[ClassIndex], table: ClassTable) -> dict[Key, list[ClassIndex]]:
    """The classes below each one."""
    found: dict[Key, list[ClassIndex]] = {}
    for each in users:
        for base in table.ancestors(each):
            found.setdefault(key_of(base), []).append(each)
    return found


def _pooled(
    own: ClassIndex,
    table: ClassTable,
    calls: Mapping[Key, Sequence[PoolCall]],
    leases: Mapping[Key, Sequence[Lease]],
    heirs: Mapping[Key, list[ClassIndex]],
) -> PooledClass:
    lineage = [own, *table.ancestors(own)]
    family = [*lineage, *heirs.get(key_of(own), ())]
    entry = table.effective(own)
    made = tuple(calls.get(key_of(own), ()))
    acquires = any(not call.releases for call in made) or _leases(own)
    known = [each.detail for each in lineage if each.detail is not None]
    return PooledClass(
        entry=entry,
        declares_switch=own.switch is not None,
        switch_span=own.detail.switch_span if own.detail else None,
        calls=made,
        leases=tuple(leases.get(key_of(own), ())),
        releases=any(call.releases for each in family for call in calls.get(key_of(each), ()))
        or any(_leases(each) for each in family),
        acquires=acquires,
        has_threshold=any(detail.has_threshold for detail in known),
        children=tuple(_children(own, entry, table)),
        bypasses=_bypasses(own) if acquires else (),
        missing=None if key_of(own) in heirs or own.is_abstract else missing_state(own, lineage),
    )


def _leases(entry: ClassIndex) -> bool:
    """Whether it takes what it needs by `with self._lease_tensor(...)`, which gives back by itself."""
    return entry.detail is not None and entry.detail.leases


def _children(own: ClassIndex, entry: ClassIndex, table: ClassTable) -> Iterator[Child]:
    if own.detail is None or own.switch is None or own.detail.attaches:
        return
    for built in own.detail.built:
        if built.opaque or any("pool" in keyword.lower() for keyword in built.keywords):
            continue
        child = table.resolve(built.name, own)
        if child is None or child.detail is None or key_of(child) == key_of(entry):
            continue
        switched = table.effective(child)
        place = _switch_place(child, table)
        if switched.switch is not None and (place is None or built.positional <= place):
            yield Child(child.name, switched.switch, built.span)


def _switch_place(child: ClassIndex, table: ClassTable) -> int | None:
    """The switch's place among the positional parameters of the constructor that is run."""
    for each in (child, *table.ancestors(child)):
        if each.switch is not None and each.detail is not None:
            return each.detail.switch_position
    return None


def _bypasses(own: ClassIndex) -> tuple[LargeAllocation, ...]:
    beside = set(own.detail.fallbacks) if own.detail else set()
    return tuple(each for each in own.allocations if each.temporary and each.span not in beside)
