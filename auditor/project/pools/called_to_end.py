"""Methods that hand out the function by which what they did is undone: `stop = bus.subscribe(listener)` and
`stop()`, `lane, done = lanes.hire()` and `done()`.

Who never calls it may want it to last. So that is asked of each user: only who calls it on some of his ways
has forgotten it on the others."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.shapes.changes import UNDONE_BY, Change, Did, all_changes
from auditor.protocols.vocabulary import Name


def called_to_end(
    model: ClassModel, cls: Class, methods: list[Function], paired: Set[Function]
) -> Iterator[Pair]:
    """Of the methods that are no half of any pair yet."""
    for method in methods:
        if method in paired or method.name.startswith("_") or LENDING & set(method.decorators):
            continue
        if not (method.nested or "partial(" in method.text or "lambda" in method.text):
            continue
        handed = list(_handed(model, cls, method))
        begun = list(all_changes(method)) if handed else []
        ends = [(part, end) for part, end, done in handed if _undone(begun, done)]
        if ends and len({part for part, _ in ends}) == 1:
            half = Half(method, Name("acquire", frozenset()), by_shape=True, part=ends[0][0])
            back = tuple(Half(end, Name("release", frozenset())) for _, end in ends)
            yield Pair(f"{cls.name}.{method.name}()", cls, (half,), back, called=True)


def _undone(begun: list[Change], done: list[Change]) -> bool:
    return any(
        each.way == change.way and each.did in UNDONE_BY.get(change.did, ()) and each.did is not Did.SET
        for change in begun
        for each in done
    )


def _handed(
    model: ClassModel, cls: Class, method: Function
) -> Iterator[tuple[int | None, Function, list[Change]]]:
    """Functions that it returns, alone or as one of several, and what they change of its object."""
    for node in method.statements:
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        several = isinstance(node.value, ast.Tuple)
        for number, part in enumerate(node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]):
            if (end := _function_of(model, cls, method, part)) is not None:
                yield number if several else None, end, list(all_changes(end))


def _function_of(model: ClassModel, cls: Class, method: Function, value: ast.expr) -> Function | None:
    match value:
        case ast.Name(id=name) if name in method.nested:
            return method.nested[name]
        case ast.Name(id=name):
            made = list(given_to(method, name))
            alone = len(made) == 1 and not isinstance(made[0], ast.Name)
            return _function_of(model, cls, method, made[0]) if alone else None
        case ast.Call(func=maker, args=[told, *_]) if last_part(maker) == "partial":
            pass
        case ast.Lambda(body=ast.Call(func=told)):
            pass
        case _:
            return None
    asked = own_attribute(told, method.owner or "")
    return model.method(cls, asked) if asked is not None else None
