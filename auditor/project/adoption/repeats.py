"""Allocating methods whose code is the same in several classes, none of which could have inherited it."""

from collections.abc import Iterable
from dataclasses import dataclass

from auditor.project.adoption.class_table import ClassTable
from auditor.source.entries import Allocator, ClassIndex


@dataclass(frozen=True, slots=True)
class Repeat:
    """`entry` writes again what `first` has written; `more` other methods of it are repetitions too."""

    entry: ClassIndex
    allocator: Allocator
    first: ClassIndex
    first_allocator: Allocator
    more: int = 0


def repeats(table: ClassTable) -> tuple[Repeat, ...]:
    """One for each class but the first of those that share code, by place."""
    firsts: dict[str, tuple[ClassIndex, Allocator]] = {}
    found: list[Repeat] = []
    for entry in sorted(_allocating(table.classes()), key=lambda each: each.span):
        again = []
        for allocator in entry.detail.allocators if entry.detail else ():
            first, its = firsts.setdefault(allocator.digest, (entry, allocator))
            if first.name != entry.name:  # copies of one class are copies of its file, as vendored code is
                again.append(Repeat(entry, allocator, first, its))
        if again:
            only = again[0]
            found.append(Repeat(entry, only.allocator, only.first, only.first_allocator, len(again) - 1))
    return tuple(found)


def _allocating(classes: Iterable[ClassIndex]) -> Iterable[ClassIndex]:
    return (each for each in classes if each.detail is not None and each.detail.allocators)
