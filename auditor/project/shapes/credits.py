"""Credits that are only counted: `take()` says no where there is none, and `put()` is one more. A box of
which things are taken is called so as well, and has what was put in."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.use_counts import asks, counted


def credits_taken(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """Methods of one class, of which the one refuses by the count that both change, the other does not."""
    for begins in methods:
        for ends in methods:
            if ends.name == begins.name.replace("take", "put", 1) != begins.name:
                up = counted(begins, ast.Add) & counted(ends, ast.Sub)
                down = counted(begins, ast.Sub) & counted(ends, ast.Add)
                if any(_only_counts(begins, ends, count) for count in up | down):
                    yield begins, ends


def granted(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """`try_probe()` says no where too many are out, and counts one more; `report(ok)` counts one less. No
    name says so: those who use them are to be asked, and all where there are several ways to take one."""
    for begins in methods:
        for ends in methods if not own_parameters(begins) and _refuses(begins) else ():
            up = counted(begins, ast.Add) & counted(ends, ast.Sub)
            down = counted(begins, ast.Sub) & counted(ends, ast.Add)
            both = {count for count in up | down if asks(field_work(begins), count)}
            if both and not _refuses(ends):
                way = ast.Add if up else ast.Sub
                if not any(both & counted(each, way) for each in methods if each is not begins):
                    yield begins, ends


def _refuses(method: Function) -> bool:
    """It answers yes and no, and nothing else."""
    returned = [each.value for each in method.statements if isinstance(each, ast.Return) and each.value]
    answers = [value.value for value in returned if isinstance(value, ast.Constant)]
    return len(answers) == len(returned) and {True, False} <= set(answers)


def _only_counts(begins: Function, ends: Function, count: str) -> bool:
    written = {
        own_attribute(node, method.owner or "")
        for method in (begins, ends)
        for node in method.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    answers = field_work(begins).returned
    refuses = bool(answers) and all(isinstance(each, ast.Constant) for each in answers)
    asked = asks(field_work(begins), count) and not asks(field_work(ends), count)
    return (
        written == {count} and refuses and asked and not own_parameters(begins) and _may_be_told_nothing(ends)
    )


def _may_be_told_nothing(method: Function) -> bool:
    args = None if isinstance(method.node, ast.Module) else method.node.args
    return args is not None and len(args.defaults) == len(own_parameters(method))
