"""Memory that is read before it is written: made cleared, so that what is read is zero, not chance."""

import ast

from auditor.case import Case, Parsed
from auditor.model import Edit, Finding, FixOffer, Safety, Span

CLEARED = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
ONLY_UNCLEARED = {"empty": frozenset(("memory_format",)), "new_empty": frozenset(("memory_format",))}
"""Arguments that the cleared form does not take."""


def made_cleared(case: Case) -> FixOffer | None:
    """`torch.zeros` for `torch.empty`, where the code calls it by its module or on a tensor."""
    file = case.file
    calls = _uncleared(file, case.finding) if file is not None else []
    if file is None or len(calls) != 1 or not isinstance(function := calls[0].func, ast.Attribute):
        return None
    if any(word.arg in ONLY_UNCLEARED.get(function.attr, ()) for word in calls[0].keywords):
        return None
    name, end = CLEARED[function.attr], file.span(function)
    place = Span(file.path, end.end_line, end.end_column - len(function.attr), end.end_line, end.end_column)
    text = f"`{name}` instead of `{function.attr}`"
    return FixOffer(Safety.UNSAFE, text, (Edit(place, name),))


def _uncleared(file: Parsed, finding: Finding) -> list[ast.Call]:
    """Where the trace begins; within the expression that reads the result at once, where there is none."""
    made = finding.trace[0] if finding.trace else finding.span
    if made.path != file.path or not file.moved.isdisjoint(range(made.line, finding.span.end_line + 1)):
        return []
    return [
        node
        for node in file.nodes_at(made.line)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CLEARED
        and _is_meant(file.span(node), finding)
    ]


def _is_meant(call: Span, finding: Finding) -> bool:
    if finding.trace:
        return (call.line, call.column) == (finding.trace[0].line, finding.trace[0].column)
    read = finding.span
    begins, ends = (call.line, call.column), (call.end_line, call.end_column)
    return (read.line, read.column) <= begins and ends <= (read.end_line, read.end_column)
