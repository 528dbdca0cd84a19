"""Pool adoption across the project: which classes use a pool, how completely, and which ought to."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from auditor.model import ClassRow
from auditor.project.class_table import ClassTable
from auditor.source.entries import ClassIndex, FileIndex, LargeAllocation

_PRIORITY = {3: "high", 2: "medium", 1: "low"}
_TEST_FILE = re.compile(r"(?:^|/)(?:tests?|testing)/|(?:^|/)(?:test_[^/]*|conftest|[^/]*_test)\.py$")
_TENSOR_POOL = re.compile(r"^(?:Tensor)?MemoryPool(?:Mixin)?$|^get_\w*memory_pool$")


@dataclass(frozen=True, slots=True)
class PoolCalls:
    """What the flow analysis decided of one class: real acquires and releases, not names."""

    acquires: bool
    releases: bool


@dataclass(frozen=True, slots=True)
class Adoption:
    """The summary's figures, the class table, and the modules that PA302 speaks of."""

    files_importing_pool: int = 0
    files_using_pool: int = 0
    classes_with_pool_switch: int = 0
    switch_default_on: int = 0
    switch_default_off: int = 0
    rows: tuple[ClassRow, ...] = ()
    modules_without_pool: tuple[ClassIndex, ...] = ()


def adoption(files: Iterable[FileIndex], flow: Mapping[tuple[str, str], PoolCalls] | None = None) -> Adoption:
    """`flow` maps (path, qualified class name) to what was decided; a class it does not name is judged by
    names.
    """
    known = sorted(files, key=lambda file: file.path)
    table = ClassTable(known)
    classes = table.that_matter()
    classes = [_corrected(each, (flow or {}).get((each.span.path, each.qualname))) for each in classes]
    switched = [each for each in classes if each.switch is not None]
    rows = [row for each in classes if (row := _row(each, table)) is not None]
    return Adoption(
        files_importing_pool=sum(bool(file.pool_imports) for file in known),
        files_using_pool=sum(file.uses_pool for file in known),
        classes_with_pool_switch=len(switched),
        switch_default_on=sum(each.switch_default is True for each in switched),
        switch_default_off=sum(each.switch_default is False for each in switched),
        rows=tuple(sorted(rows, key=lambda row: (row.path, row.line, row.name))),
        modules_without_pool=_without_pool(classes, known, table),
    )


def _corrected(entry: ClassIndex, decided: PoolCalls | None) -> ClassIndex:
    if decided is None:
        return entry
    return replace(entry, acquires=decided.acquires, releases=decided.releases)


def _row(entry: ClassIndex, table: ClassTable) -> ClassRow | None:
    if entry.defines_pool:
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
    """A pool of tensors in the project, or one imported from elsewhere; a pool of blocks or ids does not
    serve.
    """
    if any(each.switch is not None or each.serves_tensors for each in classes):
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
