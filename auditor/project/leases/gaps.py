"""Lists of which two parts go their ways and what lies between them goes nowhere: `kept = slots[:n]` and
`pool.free(slots[n + 1 :])`."""

import ast
from collections.abc import Sequence
from dataclasses import replace

from auditor.flow.effects import Value
from auditor.flow.lease import Leak, Loss
from auditor.flow.trace import span_of
from auditor.model import Step
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.outcome import Outcome, loses_normally
from auditor.source.nodes import walk


def told_of_gaps(outcome: Outcome) -> Outcome:
    """Of a list that is asked for its two parts, and whether there is one, and nothing else: whatever becomes
    of those. Of memory, parts are views; and what libraries lend is no list."""
    lease, function = outcome.lease, outcome.function
    seen_to = lease.released or lease.handed_over
    several = outcome.acquisition.value in (Value.INDEX, Value.OBJECT) and not outcome.acquisition.declared
    if not several or loses_normally(lease) or not seen_to:
        return outcome
    name = _name_of(function, outcome.call)
    parts = _parts(function, name) if name else []
    if not _leave_a_gap(function, parts):
        return outcome
    at = span_of(function.module.path, max(parts, key=lambda part: part.lineno), function.module.lines)
    begun = Step(lease.span.path, lease.span.line, lease.span.column, "acquired here")
    lost = Step(at.path, at.line, at.column, "what lies between the two parts is in neither")
    leak = Leak(Loss.FALL_THROUGH, at, name, (begun, lost), parted=True)
    return replace(outcome, lease=replace(lease, leaks=(*lease.leaks, leak)))


def _name_of(function: Function, call: ast.Call) -> str:
    """`slots` of `slots = pool.take(n)`, which is never given anything else."""
    names = [
        target.id
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and (value.value if isinstance(value, ast.Await) else value) is call
    ]
    stores = [
        node
        for node in function.nodes
        if isinstance(node, ast.Name) and node.id in names and not isinstance(node.ctx, ast.Load)
    ]
    return names[0] if len(names) == len(stores) == 1 else ""


def _parts(function: Function, name: str) -> list[ast.Subscript]:
    """The slices that are taken of it; none where it is used for more."""
    slices: list[ast.Subscript] = []
    aside: set[int] = set()
    for node in function.nodes:
        match node:
            case ast.Subscript(value=ast.Name(id=of) as read, slice=ast.Slice(step=None), ctx=ast.Load()) if (
                of == name
            ):
                slices.append(node)
                aside.add(id(read))
            case ast.Compare(
                left=ast.Name() as read, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
            ):
                aside.add(id(read))
    reads = (n for n in function.nodes if isinstance(n, ast.Name) and n.id == name)
    others = any(isinstance(n.ctx, ast.Load) and id(n) not in aside for n in reads)
    return [] if others else slices


def _leave_a_gap(function: Function, parts: Sequence[ast.Subscript]) -> bool:
    """`[:n]` and `[n + 1 :]`, of one n."""
    if len(parts) != 2:
        return False
    first, last = sorted(
        (part.slice for part in parts), key=lambda each: getattr(each, "upper", None) is None
    )
    match first, last:
        case (
            ast.Slice(lower=None, upper=ast.expr() as upper),
            ast.Slice(
                lower=ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(value=int() as more)), upper=None
            ),
        ) if more > 0 and ast.unparse(left) == ast.unparse(upper):
            return not _changes_between(function, upper, parts)
    return False


def _changes_between(function: Function, bound: ast.expr, parts: Sequence[ast.Subscript]) -> bool:
    """A call may answer otherwise the second time; a name may have been given another number."""
    asked = list(walk(bound))
    if any(isinstance(node, ast.Call) for node in asked):
        return True
    names = {node.id for node in asked if isinstance(node, ast.Name)}
    lines = sorted(part.lineno for part in parts)
    return any(
        isinstance(node, ast.Name)
        and node.id in names
        and not isinstance(node.ctx, ast.Load)
        and lines[0] <= node.lineno <= lines[1]
        for node in function.nodes
    )
