"""State that a pooled base sets up, and whether construction ever reaches the method that does."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.source.entries import ClassIndex

_SETS_UP = re.compile(r"__init__|_(?:init|setup|set_up)_\w+")
"""Methods that only construction calls; a public one may be called by whoever builds the object."""
_DOUBLE = re.compile(r"_*(?:Mock|Fake|Stub|Dummy)|\w*(?:Mock|Fake|Stub)$")
"""Stand-ins skip what they stand in for, on purpose."""


@dataclass(frozen=True, slots=True)
class MissingState:
    """`owner.setter` sets `attribute`; no constructor calls it, and `reader` will ask for the field."""

    attribute: str
    owner: str
    setter: str
    reader: str


def missing_state(entry: ClassIndex, lineage: Sequence[ClassIndex]) -> MissingState | None:
    """`lineage` is the class itself and its bases in the project, nearest first."""
    if entry.detail is None or not entry.has_init or entry.detail.init_span is None:
        return None
    if _DOUBLE.match(entry.name):
        return None
    if any(each.has_init and each.detail is None for each in lineage):
        return None  # a constructor that nothing is known of may do it
    reached = _reached(lineage)
    for attribute in sorted(_read(lineage)):
        setters = list(_setters(lineage, attribute))
        if not setters or any(owner is entry or not _SETS_UP.fullmatch(name) for owner, name in setters):
            continue
        if not any((id(owner), name) in reached for owner, name in setters):
            owner, setter = setters[0]
            return MissingState(attribute, owner.name, setter, _reader(lineage, attribute))
    return None


def _read(lineage: Sequence[ClassIndex]) -> set[str]:
    return {attribute for each in lineage if each.detail for attribute, _ in each.detail.reads}


def _reader(lineage: Sequence[ClassIndex], attribute: str) -> str:
    readers = [
        name for each in lineage if each.detail for read, name in each.detail.reads if read == attribute
    ]
    return min(readers, key=lambda name: (name.startswith("__"), name))


def _setters(lineage: Sequence[ClassIndex], attribute: str) -> Iterator[tuple[ClassIndex, str]]:
    for each in lineage:
        for written, method in each.detail.sets if each.detail else ():
            if written == attribute:
                yield each, method


def _reached(lineage: Sequence[ClassIndex]) -> set[tuple[int, str]]:
    """Every (class, method) that construction may run; a name alone reaches every class that has it."""
    waiting = [(lineage[0], "__init__")]
    reached: set[tuple[int, str]] = set()
    while waiting:
        owner, method = waiting.pop()
        if (id(owner), method) in reached:
            continue
        reached.add((id(owner), method))
        for called in dict(owner.detail.calls).get(method, ()) if owner.detail else ():
            waiting += _called(called, owner, lineage)
    return reached


def _called(called: str, owner: ClassIndex, lineage: Sequence[ClassIndex]) -> list[tuple[ClassIndex, str]]:
    before, _, name = called.rpartition(".")
    if before == "super()":
        return [(each, name) for each in lineage if each is not owner]
    if not before:
        return [(each, name) for each in lineage]
    return [(each, name) for each in lineage if each.name == before.rpartition(".")[2]]
