"""Acquire calls, function by function, with the nodes of the flow graph that stand for them."""

import ast
import re
from collections.abc import Iterator

from auditor.ir.ops import Call
from auditor.project.modules import Function, Module
from auditor.project.recognise import Recogniser, Source


def functions_with(module: Module, names: re.Pattern[str]) -> Iterator[tuple[Function, list[ast.Call]]]:
    """Functions that make calls whose last name matches, with those calls in source order."""
    for function in sorted(
        set(module.by_node.values()), key=lambda f: (getattr(f.node, "lineno", 0), f.qualname)
    ):
        calls = [call for call in own_calls(function) if names.fullmatch(last_name(call))]
        if calls:
            yield function, calls


def own_calls(function: Function) -> Iterator[ast.Call]:
    """Calls of a function, those of functions and classes nested in it left out."""
    body = function.node.body if isinstance(function.node.body, list) else [function.node.body]
    stack: list[ast.AST] = list(reversed(body))
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def last_name(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def site_nodes(function: Function, call: ast.Call) -> list[int]:
    """A call in a `finally` body stands at several nodes."""
    return [index for index, op in enumerate(function.graph.ops) if isinstance(op, Call) and op.at is call]


def acquires(
    recogniser: Recogniser, function: Function, calls: list[ast.Call]
) -> list[tuple[ast.Call, Source]]:
    found = []
    for call in calls:
        source = recogniser.source(function, call)
        if source is not None:
            found.append((call, source))
    return found
