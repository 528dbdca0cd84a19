"""What a pool returns beside the lease, and is None where it lends nothing: `return None, None`; and what it
returns in its place, `return self._ports.pop() if self._ports else 0`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import ways
from auditor.project.code.modules import Function


def known_beside(function: Function, part: int) -> frozenset[tuple[str, bool]]:
    """Of the other items of what it returns, those that are something wherever the lease is."""
    returned = list(_tuples(function))
    refused = [items for items in returned if part < len(items) and _is_none(items[part])]
    lent = [items for items in returned if items not in refused]
    return frozenset(
        (f"[{number}] is None", False)
        for number in range(min(map(len, returned), default=0))
        if refused and number != part
        if all(_is_none(items[number]) for items in refused)
        if not any(_is_none(items[number]) for items in lent)
    )


def zero_is_none(function: Function) -> bool:
    """It returns a plain 0 on one way, and what is no constant on others."""
    answers = [node.value for node in function.statements if isinstance(node, ast.Return) and node.value]
    answers = [way for answer in answers for way in ways(answer)]
    plain = [answer for answer in answers if isinstance(answer, ast.Constant)]
    return len(plain) < len(answers) and any(type(each.value) is int and each.value == 0 for each in plain)


def _tuples(function: Function) -> Iterator[list[ast.expr]]:
    for node in function.statements:
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            yield node.value.elts


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
