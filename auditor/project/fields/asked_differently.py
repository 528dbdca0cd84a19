"""Ends that ask for another setting than the beginning did: `if self.pp > 1: self.group = groups.attach()`,
and later `if self.dp > 1: groups.detach(self.group)`. What the constructor was told nobody changes, so that
there are objects with the one and without the other."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def asks_another_setting(
    method: Function, begun: Function, call: ast.Call, family: Sequence[Function], field: str
) -> bool:
    """`method` ends what `call` in `begun` has put into the field, and both ask for settings alone."""
    settings = _settings(family)
    ends = [each for each in method.calls if _is_told(each, method, field)]
    asked = [set(_asked_around(method, each)) - {field} for each in ends]
    begins = set(_asked_around(begun, call)) - {field}
    if method is begun or not ends or not begins or not all(asked):
        return False
    apart = all(names <= settings and names.isdisjoint(begins) for names in asked)
    return apart and begins <= settings


def _settings(family: Sequence[Function]) -> Set[str]:
    """Fields that the constructor sets to what it is told, and no other method writes."""
    told, written = set[str](), set[str]()
    for method in family:
        own = method.owner or ""
        for target, value in assignments(method):
            if (name := own_attribute(target, own)) is None:
                continue
            plain = isinstance(value, ast.Name) and value.id in method.parameters
            (told if method.name == "__init__" and plain else written).add(name)
        for node in method.nodes:
            if isinstance(node, ast.AugAssign) and (name := own_attribute(node.target, own)) is not None:
                written.add(name)
    return told - written


def _is_told(call: ast.Call, method: Function, field: str) -> bool:
    return any(own_attribute(each, method.owner or "") == field for each in call.args)


def _asked_around(method: Function, call: ast.Call) -> Iterator[str]:
    """Fields that the choices ask for in whose first branch it stands."""
    for node in method.statements:
        if isinstance(node, ast.If) and any(each is call for part in node.body for each in walk(part)):
            for each in walk(node.test):
                if isinstance(each, ast.Attribute) and (name := own_attribute(each, method.owner or "")):
                    yield name
