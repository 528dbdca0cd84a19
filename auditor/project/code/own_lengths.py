"""Objects of the tree that have a length of their own: `len(shard) == 0` asks what is in the shard, and there
is a shard either way.

Of a list the length says whether anything was handed out. Of an object that is asked for None besides, it
says something else."""

import ast
from collections.abc import Iterator

from auditor.ir.ops import Assume
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function


def tell_lengths_apart(function: Function, model: ClassModel) -> None:
    """Tell the function's graph that conditions about such lengths say nothing of the objects."""
    graph = function.graph
    asked = {f"{name} is None" for name in _measured(function)} & graph.condition_names.keys()
    for op in graph.ops if asked else ():
        if not isinstance(op, Assume) or f"{op.key} is None" not in asked:
            continue
        measured = _length_of(op.at)
        if measured is not None and _has_its_own(model, function, measured):
            op.key, op.subject = f"len({op.key})", None
            graph.condition_names[op.key] = op.names


def _measured(function: Function) -> Iterator[str]:
    return (
        call.args[0].id
        for call in function.calling("len")
        if call.args and isinstance(call.args[0], ast.Name)
    )


def _length_of(test: ast.AST) -> ast.Name | None:
    match test:
        case ast.Compare(left=ast.Call(func=ast.Name(id="len"), args=[ast.Name() as measured])):
            return measured
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name() as measured]):
            return measured
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _length_of(operand)
    return None


def _has_its_own(model: ClassModel, function: Function, measured: ast.Name) -> bool:
    cls = model.type_of(function, measured)
    return isinstance(cls, Class) and any("__len__" in each.methods for each in model.lineage(cls))
