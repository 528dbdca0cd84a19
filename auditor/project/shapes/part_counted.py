"""Which of several things that a function returns it has counted up."""

import ast

from auditor.project.code.modules import Function


def part_counted(begins: Function) -> int | None:
    """Which of those that it returns has one more: of `return node, matched` the first, `node.locks += 1`."""
    raised = {
        node.target.value.id
        for node in begins.statements
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
        if isinstance(node.target, ast.Attribute) and isinstance(node.target.value, ast.Name)
    }
    answers = [node.value for node in begins.statements if isinstance(node, ast.Return)]
    parts = {
        tuple(i for i, each in enumerate(value.elts) if getattr(each, "id", None) in raised)
        if isinstance(value, ast.Tuple)
        else ()
        for value in answers
    }
    return next(iter(parts))[0] if len(parts) == 1 and len(next(iter(parts))) == 1 else None
