"""Pool adoption across the project: which classes use a pool, how completely, and which ought to."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile

from auditor.config import StandardNames
from auditor.flow.lease import Lease
from auditor.model import ClassRow, Conventions
from auditor.project.adoption.class_table import ClassTable
from auditor.project.adoption.conventions import conventions
from auditor.project.adoption.effort import edits
from auditor.project.adoption.pool_call import PoolCall
from auditor.project.adoption.pooled_class import Key, PooledClass, key_of, pooled_classes
from auditor.project.adoption.repeats import Repeat, repeats
from auditor.project.adoption.standard import Standard, standard
from auditor.source.entries import ClassIndex, FileIndex, LargeAllocation

_PRIORITY = {3: "high", 2: "medium", 1: "low"}
_TEST_FILE = re.compile(r"(?:^|/)(?:tests?|testing)/|(?:^|/)(?:test_[^/]*|conftest|[^/]*_test)\.py$")
_TENSOR_POOL = re.compile(r"^(?:Tensor)?MemoryPool(?:Mixin)?$|^get_\w*memory_pool$")


@dataclass(frozen=True, slots=True)
class Followed:
    """What the flow analysis decided: real acquires and releases, not names, in the files that it read."""

    paths: Set[str] = frozenset()
    calls: Sequence[PoolCall] = ()
    leases: Sequence[Lease] = ()


@dataclass(frozen=True, slots=True)
class Adoption:
    """The summary's figures, the class table, and what the integration rules speak of."""

    files_importing_pool: int = 0
    files_using_pool: int = 0
    classes_with_pool_switch: int = 0
    switch_default_on: int = 0
    switch_default_off: int = 0
    rows: tuple[ClassRow, ...] = ()
    modules_without_pool: tuple[ClassIndex, ...] = ()
    pooled: tuple[PooledClass, ...] = ()
    pool_has_threshold: bool = False
    repeated_allocators: tuple[Repeat, ...] = ()
    standard: Standard = field(default_factory=Standard)
    conventions: Conventions = field(default_factory=Conventions)


def adoption(
    files: Iterable[FileIndex],
    flow: Followed | None = None,
    settings: StandardNames | None = None,
) -> Adoption:
    """A file that the flow analysis did not read is judged by the names in it."""
    flow = flow or Followed()
    calls, leases = _by_class(flow)
    known = [_corrected(file, flow, calls) for file in sorted(files, key=lambda file: file.path)]
    table = ClassTable(known)
    classes = table.that_matter()
    switched = [each for each in classes if each.switch is not None]
    pooled = pooled_classes(table, calls, leases)
    users = [each.entry for each in pooled if each.entry.is_module or each.entry.switch is not None]
    declaring = [each.entry for each in pooled if each.declares_switch]
    names = standard(settings or StandardNames(), users, declaring, calls)
    rows = [row for each in classes if (row := _row(each, calls.get(key_of(each), ()))) is not None]
    return Adoption(
        files_importing_pool=sum(bool(file.pool_imports) for file in known),
        files_using_pool=sum(file.uses_pool for file in known),
        classes_with_pool_switch=len(switched),
        switch_default_on=sum(each.switch_default is True for each in switched),
        switch_default_off=sum(each.switch_default is False for each in switched),
        rows=tuple(sorted(rows, key=lambda row: (row.path, row.line, row.name))),
        modules_without_pool=_without_pool(classes, known, table),
        pooled=pooled,
        pool_has_threshold=any(_has_threshold(each) for each in table.classes()),
        repeated_allocators=repeats(table),
        standard=names,
        conventions=conventions(known, pooled, names),
    )


def _has_threshold(entry: ClassIndex) -> bool:
    return entry.defines_pool and entry.detail is not None and entry.detail.has_threshold


def _by_class(flow: Followed) -> tuple[Mapping[Key, Sequence[PoolCall]], Mapping[Key, Sequence[Lease]]]:
    """Calls by the class whose method makes them, and leases with the acquiring ones."""
    calls: defaultdict[Key, list[PoolCall]] = defaultdict(list)
    leases: defaultdict[Key, list[Lease]] = defaultdict(list)
    by_place = {each.span: each for each in flow.leases}
    for call in flow.calls:
        key = call.span.path, call.owner
        calls[key].append(call)
        lease = None if call.releases else by_place.get(call.span)
        if lease is not None:
            leases[key].append(lease)
    return dict(calls), dict(leases)


def _corrected(file: FileIndex, flow: Followed, calls: Mapping[Key, Sequence[PoolCall]]) -> FileIndex:
    """The file's classes with the real calls in place of the names, if the flow analysis read it."""
    if file.path not in flow.paths or not file.classes:
        return file
    classes = []
    for each in file.classes:
        made = calls.get(key_of(each), ())
        leases = each.detail is not None and each.detail.leases
        acquires = leases or any(not call.releases for call in made)
        releases = leases or any(call.releases for call in made)
        if (acquires, releases) != (each.acquires, each.releases):
            each = replace(each, acquires=acquires, releases=releases)
        classes.append(each)
    return replace(file, classes=tuple(classes))


def _row(entry: ClassIndex, calls: Sequence[PoolCall]) -> ClassRow | None:
    if entry.defines_pool and not entry.is_module:
        return None
    uses = entry.switch is not None or entry.acquires or entry.releases
    if not uses and not (entry.is_module and entry.allocations):
        return None
    support = _support(entry)
    heaviest = _heaviest(entry.allocations)
    wanting = support != "full" and heaviest is not None
    return ClassRow(
        name=entry.qualname,
        path=entry.span.path,
        line=entry.span.line,
        bases=entry.bases,
        switch=entry.switch,
        switch_default=entry.switch_default,
        acquires=entry.acquires,
        releases=entry.releases,
        cleans_up=entry.cleans_up,
        support=support,
        priority=_PRIORITY[heaviest.weight] if heaviest is not None and wanting else None,
        estimated_bytes=heaviest.bytes if heaviest is not None else None,
        reason=f"{heaviest.operation} of {heaviest.shape}: {heaviest.reason}" if heaviest is not None else "",
        edits=edits(entry, support, calls),
    )


def _heaviest(allocations: tuple[LargeAllocation, ...]) -> LargeAllocation | None:
    return max(allocations, key=lambda each: (each.weight, -each.span.line), default=None)


def _support(entry: ClassIndex) -> str:
    """full: what it acquires it releases, and what it keeps between calls it cleans up. partial: less.
    none: no pool.
    """
    if entry.acquires and entry.releases:
        return "full" if entry.cleans_up or not entry.keeps_leases else "partial"
    if entry.acquires or entry.releases or entry.switch is not None:
        hands_on = entry.passes_switch and not entry.acquires and not entry.allocations
        return "full" if hands_on else "partial"
    return "none"


def _without_pool(
    classes: list[ClassIndex], files: list[FileIndex], table: ClassTable
) -> tuple[ClassIndex, ...]:
    if not _pool_at_hand(classes, files, table):
        return ()
    root = len(_common_folder([file.path for file in files]))
    found = [
        each for each in classes if _should_pool(each, table) and not _TEST_FILE.search(each.span.path[root:])
    ]
    return tuple(sorted(found, key=lambda each: each.span))


def _pool_at_hand(classes: list[ClassIndex], files: list[FileIndex], table: ClassTable) -> bool:
    """A pool of tensors that modules of the project use, or one imported from elsewhere.

    A pool of blocks or ids does not serve, nor does one that only a transfer engine or a cache asks.
    """
    if any(each.switch is not None for each in classes):
        return True
    served = any(each.is_module and (each.mentions_pool or each.acquires) for each in classes)
    if any(
        each.serves_tensors and (served or each.is_module or each.name.endswith("Mixin")) for each in classes
    ):
        return True
    return any(
        _TENSOR_POOL.search(each.name)
        and not each.module.startswith("cupy")
        and not table.has_module(each.module)
        for file in files
        for each in file.pool_imports
    )


def _should_pool(entry: ClassIndex, table: ClassTable) -> bool:
    return (
        entry.is_module
        and not entry.is_abstract
        and any(each.temporary for each in entry.allocations)
        and not (entry.mentions_pool or entry.acquires or entry.releases or entry.defines_pool)
        and not table.child_pools(entry)
    )


def _common_folder(paths: list[str]) -> str:
    """`a/b/` of a/b/c.py and a/b/d/e.py: a tree that lies below a folder named tests is no test by that."""
    if not paths:
        return ""
    first, last = (path.split("/")[:-1] for path in (min(paths), max(paths)))  # the sorted ends differ most
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))]
    return "".join(f"{name}/" for name in shared)
