"""Fields that calls write behind the back of the function that asks for them.

`self._locked = True; self.connect(); if self._locked:` asks what `connect` left there, and `if
self.pool.available == 0:` in a loop asks again what each `self.pool.take()` has changed."""

import ast
import re
from collections.abc import Iterator

from auditor.flow.knowledge import EMPTYING, EXTENDING, FILLING
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Store
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function

WORKING = EMPTYING | EXTENDING | FILLING
NO_NAME = re.compile(r"\W")


def note_rewritten_flags(function: Function, calls: Calls) -> None:
    """Tell the function's graph which of its calls write a field that it asks for: one of its own that it
    stores as well, or one of another object."""
    graph, own = function.graph, function.owner
    stored = {"".join(op.target) for op in graph.ops if isinstance(op, Store) and len(op.target) == 2}
    for op in graph.ops:
        if not isinstance(op, Call) or op.receiver is None:
            continue
        asked = _asked_of("".join(op.receiver), graph)
        if op.receiver == (own,):
            asked = {field for field in asked if f"{own}{field}" in stored}
        if asked:
            targets = calls.targets(function, op.at)[0]
            written = asked & {field for target in targets for field in _written(target)}
            if written:
                graph.rewrites[id(op)] = frozenset(written)


def _asked_of(receiver: str, graph: Graph) -> set[str]:
    """The fields of that object that conditions read."""
    about = receiver.lstrip("@") + "."
    asked = (key.partition(about)[2] for key in graph.condition_names if about in key)
    return {"." + NO_NAME.split(rest)[0] for rest in asked}


def _written(method: Function) -> Iterator[str]:
    """Its fields, and what properties tell of them."""
    written = {field for node in method.nodes for field in _worked_on(node, method.owner)}
    yield from written
    for other in method.cls.methods.values() if method.cls is not None else ():
        if "property" in other.decorators and not written.isdisjoint(_read(other)):
            yield "." + other.name


def _worked_on(node: ast.AST, own: str | None) -> Iterator[str]:
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr=field, ctx=ast.Store()) if name == own:
            yield "." + field
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr=field), attr=method)
        ) if name == own and method in WORKING:
            yield "." + field


def _read(method: Function) -> Iterator[str]:
    attributes = (node for node in method.nodes if isinstance(node, ast.Attribute))
    return ("." + each.attr for each in attributes if getattr(each.value, "id", None) == method.owner)
