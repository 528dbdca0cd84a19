"""Other words for a field: properties that return it, and fields of objects that other classes look after."""

import ast
from collections.abc import Iterable, Iterator

from auditor.project.bindings import own_name, statements_of
from auditor.project.modules import Function

PROPERTIES = frozenset({"property", "cached_property"})


def properties_of(family: Iterable[Function], attribute: str) -> frozenset[str]:
    """Names of properties by which the class speaks of its field: `fd` for `self._fd`."""
    return frozenset(
        method.name
        for method in family
        if not PROPERTIES.isdisjoint(method.decorators) and _returns(method, attribute)
    )


def _returns(method: Function, attribute: str) -> bool:
    own = own_name(method)
    for node in statements_of(method.node):
        match node:
            case ast.Return(value=ast.Call(args=[*_, returned])) | ast.Return(value=returned):
                match returned:
                    case ast.Attribute(value=ast.Name(id=name), attr=attr) if name == own and attr == attribute:
                        return True
    return False


def asked_before_it_is_set(method: Function, attribute: str, family: Iterable[Function]) -> bool:
    """`if self.connection is None: self.connection = ...` in a class that never sets it to begin with: a base class
    of another library does, and its methods are told of it."""
    begins = (each for each in family if each.name in ("__init__", "__new__", "__post_init__"))
    if any(attribute in set(_written(each)) for each in begins):
        return False
    own = own_name(method)
    tests = (node.test for node in ast.walk(method.node) if isinstance(node, (ast.If, ast.IfExp, ast.While)))
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == own
        for test in tests
        for node in ast.walk(test)
    )


def _written(method: Function) -> Iterator[str]:
    for node in ast.walk(method.node):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
