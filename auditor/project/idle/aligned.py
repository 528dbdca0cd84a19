"""What lies in a hole before the first place that suits, where a region begins at a multiple of something:

    offset, size = self.holes.pop(i)
    begin = (offset + align - 1) // align * align
    rest = offset + size - (begin + wanted)
    if rest:
        self.holes.insert(i, (begin + wanted, rest))
    return Region(begin, wanted)

From `offset` to `begin` nothing is in a hole, and nothing is part of the region that will come back."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.flow.lease import Lease
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function, Module, last_part
from auditor.project.idle.remainders import (
    PUTTING,
    blocks,
    comes_back,
    hole_lost,
    named_by,
    taken_out,
)
from auditor.source.nodes import walk

ALIGNING = re.compile(r"align|//|%|& ?~", re.IGNORECASE)
BETWEEN = "what lies before that place is in no hole, and not part of what is handed out"


def may_align(text: str) -> bool:
    return ".pop(" in text and ALIGNING.search(text) is not None


def gaps_in_front(module: Module) -> Iterator[Lease]:
    """Of functions that hand out what begins further on in a hole, in a module of which others put holes
    back."""
    for function in sorted(module.by_node.values(), key=lambda each: each.qualname):
        if isinstance(function.node, ast.Module | ast.Lambda) or not ALIGNING.search(function.text):
            continue
        for block in blocks(function):
            yield from _gaps(module, function, block)


def _gaps(module: Module, function: Function, block: Sequence[ast.stmt]) -> Iterator[Lease]:
    for at, statement in enumerate(block):
        taken = taken_out(statement)
        if taken is None or not isinstance(taken.func, ast.Attribute):
            continue
        store = ast.unparse(taken.func.value)
        parts = frozenset(named_by(function, statement, store))
        for begin, made, start in _moved_on(function, parts):
            end = _handed_out(block[at + 1 :], begin)
            if end is None or not _puts_rest_back(block[at + 1 :], store, begin):
                continue
            if _is_only_reckoned_with(function, start, begin, taken) and comes_back(module, function, store):
                yield hole_lost(
                    function, taken, store, [(made, "it begins here, further on"), (end, BETWEEN)]
                )


def _moved_on(function: Function, parts: frozenset[str]) -> Iterator[tuple[str, ast.expr, str]]:
    """`begin`, what it is, and `offset`, which that was reckoned from."""
    for target, value in assignments(function):
        if isinstance(target, ast.Name) and target.id not in parts and _aligns(value):
            starts = {node.id for node in walk(value) if isinstance(node, ast.Name)} & parts
            if len(starts) == 1:
                yield target.id, value, starts.pop()


def _aligns(value: ast.expr) -> bool:
    """`(offset + align - 1) // align * align`, `offset + -offset % align`, `(offset + mask) & ~mask`,
    `align_up(offset, align)`."""
    multiple = (ast.Mod, ast.FloorDiv, ast.BitAnd)
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, multiple) for node in walk(value)) or any(
        isinstance(node, ast.Call) and ALIGNING.search(last_part(node.func)) is not None
        for node in walk(value)
    )


def _handed_out(after: Sequence[ast.stmt], begin: str) -> ast.Return | None:
    for statement in after:
        if isinstance(statement, ast.Return) and statement.value is not None:
            names = {node.id for node in walk(statement.value) if isinstance(node, ast.Name)}
            return statement if begin in names else None
    return None


def _puts_rest_back(after: Sequence[ast.stmt], store: str, begin: str) -> bool:
    """`self.holes.insert(i, (begin + wanted, rest))`: what is behind the region is a hole again."""
    for node in (each for statement in after for each in walk(statement)):
        match node:
            case ast.Call(func=func, args=args) if last_part(func) in PUTTING:
                into = func.value if isinstance(func, ast.Attribute) else None
                told = ast.unparse(into) == store if into is not None else False
                told = told or bool(args and ast.unparse(args[0]) == store)
                if told and any(getattr(part, "id", None) == begin for arg in args for part in walk(arg)):
                    return True
    return False


def _is_only_reckoned_with(function: Function, start: str, begin: str, taken: ast.expr) -> bool:
    """Nothing is told where the hole began, nor asks whether it begins where the region does."""
    inside = {
        id(part)
        for node in function.nodes
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare)
        for part in walk(node)
    }
    asked = (node for node in function.nodes if isinstance(node, ast.Compare))
    both = any(
        {start, begin} <= {getattr(part, "id", "") for part in walk(node)}
        for node in asked
        if all(isinstance(side, ast.Name) for side in (node.left, *node.comparators))
    )
    used = (
        node
        for node in function.nodes
        if isinstance(node, ast.Name) and node.id == start and isinstance(node.ctx, ast.Load)
    )
    behind = (node for node in used if node.lineno >= taken.lineno)
    return not both and all(id(node) in inside or _is_told_an_aligner(function, node) for node in behind)


def _is_told_an_aligner(function: Function, name: ast.Name) -> bool:
    """`begin = align_up(offset, align)`"""
    return any(
        ALIGNING.search(last_part(call.func)) is not None and any(arg is name for arg in call.args)
        for call in function.calls
    )
