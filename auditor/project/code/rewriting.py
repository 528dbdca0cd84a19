"""Flags that a method keeps in its fields, and the calls of its own object that write them behind its back.

`self._locked = True; self.connect(); if self._locked:` asks what `connect` left there."""

import ast
from collections.abc import Iterator

from auditor.ir.ops import Call, Store
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function


def note_rewritten_flags(function: Function, calls: Calls) -> None:
    """Tell the function's graph which of its calls write a field that it stores and tests itself."""
    graph, own = function.graph, function.owner
    kept = {
        op.target[1]
        for op in graph.ops
        if isinstance(op, Store)
        and len(op.target) == 2
        and op.target[0] == own
        and "".join(op.target) in graph.condition_names
    }
    if not kept:
        return
    for op in graph.ops:
        if isinstance(op, Call) and op.receiver == (own,):
            written = {field for target in calls.targets(function, op.at)[0] for field in _written(target)}
            if written & kept:
                graph.rewrites[id(op)] = frozenset(written & kept)


def _written(method: Function) -> Iterator[str]:
    own = method.owner
    for node in ast.walk(method.node):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()) if name == own:
                yield "." + attribute
