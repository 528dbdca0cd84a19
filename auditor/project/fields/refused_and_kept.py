"""Records that are refused with a lease on them: `start(job)` takes a row and a page, says no where there is
no page, and leaves the row where it is; the job stays in line, and its next `start(job)` puts another row
over that. And records that have a lease only while a function runs, which forgets it where it says no."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.lease import StoredField
from auditor.ir.calls import LOGGING, PUTTING
from auditor.ir.ops import Leave, Way
from auditor.project.code.answers import NOTHING
from auditor.project.code.bindings import gone_through, own_attribute, told_by_position
from auditor.project.code.modules import Function
from auditor.project.fields.back_in_line import taken_from
from auditor.project.fields.one_end_forgets import callers
from auditor.project.fields.record_places import RecordPlace
from auditor.project.fields.set_to_none import SetToNone
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

SAYING = LOGGING | {"print", "len", "sleep", "notify"}


class RefusedAndKept(SetToNone):
    """Asks the callers of a function that fills a record what they do where it says no."""

    def _kept_when_refused(self, outcome: Outcome) -> Iterator[StoredField]:
        function, place = outcome.function, self._record_place(outcome)
        cls = function.cls
        if cls is None or place is None or outcome.acquisition.foreign or not _refuses_with_it(outcome):
            return
        told = _told_of(function, place.told)
        if not told or _asks_first(function, place, outcome.call.lineno):
            return
        if _is_only_borrowed(outcome, told):
            yield StoredField(
                place.as_field(cls.qualname), outcome.lease.span, partly_by=(function.qualname,)
            )
            return
        family = set(self.family_of(cls))
        known = [
            each
            for each in callers(self.project, function)
            if each in family or _asks_another(each, function)
        ]
        left = bool(known) and all(_leaves_it_in_line(caller, function, told) for caller in known)
        if left and any(True for _ in self._ending(outcome, place.field[0][1:])):
            yield StoredField(
                place.as_field(cls.qualname), outcome.lease.span, partly_by=(function.qualname,)
            )


def _asks_another(caller: Function, function: Function) -> bool:
    """`engine.start(job)`, and not `self.start(job)` of a class that has its own."""
    calls = [call for call in caller.calls if last_name(call) == function.name]
    return any(own_attribute(call.func, caller.owner or "") is None for call in calls)


def _refuses_with_it(outcome: Outcome) -> bool:
    """On one way out it is on the record, and the answer is that of a refusal; on others it is another."""
    ops = outcome.function.graph.ops
    answers = {_answer(op) for op in ops if isinstance(op, Leave) and op.way is not Way.RAISE}
    return bool(_answers_with_it(outcome) & NOTHING) and not answers <= NOTHING


def _is_only_borrowed(outcome: Outcome, told: str) -> bool:
    """It is given back before every other answer: the record, which goes nowhere else, has it for as long as
    the function runs."""
    alone = all(path[:1] == (told,) for path in outcome.beside)
    return alone and outcome.lease.released and _answers_with_it(outcome) <= NOTHING


def _answers_with_it(outcome: Outcome) -> set[str]:
    """What is answered where it stays on the record."""
    ops = (outcome.function.graph.ops[node] for node, _ in outcome.stored)
    return {_answer(op) for op in ops if isinstance(op, Leave)}


def _answer(op: Leave) -> str:
    if isinstance(op.at, ast.Return) and op.at.value is not None:
        return ast.unparse(op.at.value)
    return "None"


def _told_of(function: Function, name: str) -> str:
    """The parameter that is the record, or that has it: `job` of `for part in job.parts:`."""
    if name in function.parameters:
        return name
    roots = {
        node.id
        for over in gone_through(function, name)
        for node in walk(over)
        if isinstance(node, ast.Name) and node.id in function.parameters[1:]
    }
    return min(roots) if len(roots) == 1 else ""


def _asks_first(function: Function, place: RecordPlace, line: int) -> bool:
    """`if job.row is None:` above, or works with the one that is there."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == place.field[0][1:]
        and isinstance(node.ctx, ast.Load)
        and node.lineno < line
        for node in function.nodes
    )


def _leaves_it_in_line(caller: Function, function: Function, told: str) -> bool:
    """The caller has the record out of a table of its own, and where it is refused does nothing with it but
    put it back there."""
    position = function.parameters.index(told) - 1
    calls = [call for call in caller.calls if last_name(call) == function.name]
    return bool(calls) and all(
        (branch := _where_refused(caller, call)) is not None
        and (record := dict(told_by_position(call)).get(position)) is not None
        and _is_in_line(caller, record)
        and not any(_sees_to(node, record, caller) for statement in branch for node in walk(statement))
        for call in calls
    )


def _where_refused(caller: Function, call: ast.Call) -> Sequence[ast.stmt] | None:
    for node in caller.statements:
        match node:
            case ast.If(test=ast.UnaryOp(op=ast.Not(), operand=asked), body=body) if asked is call:
                return body
            case ast.If(test=asked, orelse=orelse) if asked is call:
                return orelse
            case ast.While(test=ast.BoolOp(op=ast.And(), values=[*_, asked])) if asked is call:
                return []
    return None


def _is_in_line(caller: Function, record: ast.expr) -> bool:
    return any(True for _ in _lines(caller, record))


def _lines(caller: Function, record: ast.expr) -> Iterator[str]:
    if isinstance(record, ast.Name):
        yield from taken_from(caller, record.id)
    elif isinstance(record, ast.Subscript) and isinstance(record.value, ast.Attribute):
        yield record.value.attr


def _sees_to(node: ast.AST, record: ast.expr, caller: Function) -> bool:
    """A call that is given the record, or a failure that is not handled here."""
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call) or last_name(node) in SAYING:
        return False
    into = getattr(getattr(node.func, "value", None), "attr", "")
    if last_name(node) in {*PUTTING, "insert"} and into in set(_lines(caller, record)):
        return False
    wanted = ast.dump(record)
    return any(ast.dump(part) == wanted for part in walk(node) if isinstance(part, ast.expr))
