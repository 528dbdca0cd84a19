"""Tables of records that an end of the record only empties, though it gives back what lies in other fields:
`finish(request)` closes `request.matcher`, and then comes `request.matchers = {}`."""

import ast
from collections.abc import Iterator, Sequence, Set
from functools import partial

from auditor.flow.lease import Field, Leak, Loss, StoredField
from auditor.flow.trace import span_of
from auditor.ir.ops import ANY_ITEM, RESULT
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.cleared_beside_others import clears_beside_others, empties
from auditor.project.fields.in_others import only_worked_with
from auditor.project.fields.one_end_forgets import Known, callers
from auditor.project.outcome import Outcome, has_gone_to_the_caller
from auditor.source.nodes import walk


def emptied_on_records(
    outcome: Outcome, family: Sequence[Function], project: Project, known: Known, ends: Set[str]
) -> Iterator[StoredField]:
    """Of a table of what the function is told, where nobody else has the lease. Whoever is shown what was
    looked up first does not own it, unless he gives such things back himself."""
    filling, acquisition = outcome.function, outcome.acquisition
    if acquisition.foreign or acquisition.keyed or acquisition.inner or outcome.unknown or not filling.cls:
        return
    places = {path for path in (*(path for _, path in outcome.stored), *outcome.beside) if path[:1] != RESULT}
    place = next(iter(places), ())
    if len(places) != 1 or place[2:] != (ANY_ITEM,) or place[0] not in filling.parameters[1:]:
        return
    told, table = place[0], place[1][1:]
    if has_gone_to_the_caller(outcome) and not _is_looked_up(filling, outcome.call, told, table):
        return
    if any(map(known, callers(project, filling))):
        return
    for method in family:
        for record in method.parameters[1:] if method is not filling else ():
            at = next((node for node in method.statements if empties(node, record, table)), None)
            if at is None or not clears_beside_others(method, table, ends, record):
                continue
            if only_worked_with(project, table, ends=ends, aside=partial(_aside, filling, method, table)):
                span = span_of(method.module.path, at, method.module.lines)
                field = Field(filling.cls.qualname, f"{table}[*]", told)
                yield StoredField(field, outcome.lease.span, drops=(Leak(Loss.DROPPED, span, "clear", ()),))
                return


def _is_looked_up(filling: Function, call: ast.Call, told: str, table: str) -> bool:
    """`handle = request.matchers.get(key)`, or `if key in request.matchers: return`, above the acquire."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.lineno < call.lineno
        and own_attribute(node, told) == table
        for node in filling.nodes
    )


def _aside(filling: Function, emptying: Function, table: str, function: Function) -> Set[int]:
    """Where the one looks and fills, and the other empties."""
    if function is filling:
        return {id(node) for node in function.nodes if getattr(node, "attr", "") == table}
    emptied = (node for node in function.statements if isinstance(node, ast.Expr))
    clears = (node for node in emptied if any(empties(node, told, table) for told in function.parameters))
    return {id(part) for node in clears for part in walk(node)} if function is emptying else set()
