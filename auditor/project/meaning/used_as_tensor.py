"""Whether what an acquire hands out is a tensor, where the pool does not say but its user does:
`buf.copy_(x)`, `dist.all_reduce(buf)`."""

import ast
import re

from auditor.project.code.bindings import assignments, awaited
from auditor.project.code.modules import Function

IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
"""What only methods of tensors are called that change them."""

OF_TENSORS = frozenset({"torch", "dist", "F"})
"""Modules whose functions are given tensors."""


def used_as_tensor(function: Function, acquire: ast.Call) -> bool:
    names = {
        target.id
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and awaited(value) is acquire
    }
    return bool(names) and any(_says_tensor(call, names) for call in function.calls)


def _says_tensor(call: ast.Call, names: set[str]) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    receiver = call.func.value
    if IN_PLACE.fullmatch(call.func.attr):
        return _is_named(receiver, names)
    root = receiver
    while isinstance(root, ast.Attribute):
        root = root.value
    told = call.args[:1]
    return isinstance(root, ast.Name) and root.id in OF_TENSORS and any(_is_named(a, names) for a in told)


def _is_named(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names
