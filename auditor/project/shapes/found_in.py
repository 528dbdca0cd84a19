"""Things that a method looks for in a field before it takes them out by name: `hole = min(self.holes)` with
`self.holes.remove(hole)`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from auditor.project.code.bindings import given_to
from auditor.source.nodes import walk

if TYPE_CHECKING:
    from auditor.project.shapes.field_work import FieldWork


def found_in(work: FieldWork, thing: ast.expr, is_field: Callable[[ast.expr], bool]) -> list[ast.expr]:
    """The expressions by which it was found there; none if it may come from elsewhere."""
    if not isinstance(thing, ast.Name) or thing.id in work.told:
        return []
    given = list(given_to(work.method, thing.id))
    return given if all(_leads_to(work, value, is_field) for value in given) else []


def _leads_to(work: FieldWork, value: ast.expr, is_field: Callable[[ast.expr], bool]) -> bool:
    """`min(fit)` of `fit = [hole for hole in self.holes if hole.size >= n]`, too."""
    return any(map(is_field, _places(value))) or any(
        is_field(place)
        for name in _places(value)
        if isinstance(name, ast.Name)
        for given in given_to(work.method, name.id)
        for place in _places(given)
        if isinstance(place, ast.Attribute)
    )


def _places(value: ast.expr) -> Iterator[ast.expr]:
    return (each for each in walk(value) if isinstance(each, ast.Attribute | ast.Name))
