"""Other words for a field: properties that return it, and fields of objects that other classes look after."""

import ast
from collections.abc import Iterable, Iterator, Sequence

from auditor.project.code.modules import Function
from auditor.source.nodes import walk


def properties_of(family: Iterable[Function], attribute: str) -> frozenset[str]:
    """Names of properties by which the class speaks of its field: `fd` for `self._fd`."""
    return frozenset(method.name for method in family if method.is_property and _returns(method, attribute))


def _returns(method: Function, attribute: str) -> bool:
    """`return self._fd`, or `return typing.cast(File, self._fd)`."""
    own = method.owner
    returned = [node.value for node in method.statements if isinstance(node, ast.Return)]
    values = [each.args[-1] if isinstance(each, ast.Call) and each.args else each for each in returned]
    return any(
        isinstance(value, ast.Attribute)
        and isinstance(value.value, ast.Name)
        and (value.value.id, value.attr) == (own, attribute)
        for value in values
    )


def asked_before_it_is_set(method: Function, attribute: str, family: Sequence[Function]) -> bool:
    """`if self.connection is None: self.connection = ...` in a class that never sets it to begin with: a base
    class of another library does, and its methods are told of it."""
    begins = [each.node for each in family if each.name in ("__init__", "__new__", "__post_init__")]
    bodies = [part for each in family if each.cls is not None for part in each.cls.node.body]
    of_class = [part for part in bodies if isinstance(part, (ast.Assign, ast.AnnAssign))]
    if any(attribute in set(_written(each)) for each in (*begins, *of_class)):
        return False
    own = method.owner
    tests = (node.test for node in method.nodes if isinstance(node, (ast.If, ast.IfExp, ast.While)))
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == own
        for test in tests
        for node in walk(test)
    )


def _written(part: ast.AST) -> Iterator[str]:
    for node in walk(part):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
