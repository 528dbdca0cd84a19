"""Places of a field that one method marks and hands out, and another, which is told one, clears."""

import ast

from auditor.project.bindings import given_to
from auditor.project.field_work import FREE, FieldWork, Put, mentions
from auditor.protocols.vocabulary import split


def marks(work: FieldWork, put: Put) -> bool:
    """`self.used[place] = request` of a place that nobody told it, and `return place`; of what is free it is
    `self.free[place] = False`."""
    if put.key is None or _is_nothing(put.value) != _says_what_is_free(put):
        return False
    names = {each.id for each in ast.walk(put.key) if isinstance(each, ast.Name)}
    told = work.derived(work.told, frozenset())
    found = names.isdisjoint(told) or any(_looked_for(work, put.field, name) for name in names)
    handed_out = any(isinstance(value, ast.Name) and value.id in names for value in work.returned)
    return bool(names) and found and handed_out


def _looked_for(work: FieldWork, field: str, name: str) -> bool:
    """`places = torch.nonzero(self.free)[:n]`: told how many, it finds them in the field."""
    return name not in work.told and any(
        isinstance(inner, ast.Attribute) and inner.attr == field
        for value in given_to(work.method, name)
        for inner in ast.walk(value)
    )


def clears(work: FieldWork, put: Put) -> bool:
    names = work.derived(work.told, frozenset())
    cleared = put.key is not None and _is_nothing(put.value) != _says_what_is_free(put)
    return cleared and put.key is not None and mentions(put.key, names, frozenset())


def _says_what_is_free(put: Put) -> bool:
    return not FREE.isdisjoint(split(put.field))


def _is_nothing(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value
