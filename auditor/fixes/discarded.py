"""An acquire whose result nobody keeps: bound to a name, and released after the statement that needed it."""

import ast

from auditor.case import Case, Parsed
from auditor.facts import Lease
from auditor.fixes.escape import Carriers
from auditor.fixes.life import SCOPES, FunctionDef, call_at, enclosing_function, enclosing_statement, new_name
from auditor.fixes.lines import indentation, newline_of, unit_around
from auditor.fixes.try_finally import is_whole
from auditor.flow.lease import GivingBack
from auditor.model import Edit, FixOffer, Safety, Span

LATER = (ast.Lambda, ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions that may run a part of themselves later, several times, or never."""

SIMPLE = (ast.Return, ast.Assign, ast.AugAssign, ast.Expr)


def bound_and_released(case: Case) -> FixOffer | None:
    """`pool.allocate(n) + x`: the lease gets a name, and is given back when the statement is done."""
    file, lease = case.file, case.lease
    call = call_at(file, lease.span) if file and lease else None
    if file is None or lease is None or lease.giving_back is None or call is None:
        return None
    statement, function = enclosing_statement(file, call), enclosing_function(file, call)
    if function is None or not is_whole(file, statement) or not _runs_first(file, call, statement):
        return None
    if isinstance(statement, ast.Expr) and statement.value is call:
        return _released_at_once(file, lease, lease.giving_back, call, statement, function)
    return _around(file, lease, lease.giving_back, call, statement, function)


def _released_at_once(
    file: Parsed, lease: Lease, way: GivingBack, call: ast.Call, statement: ast.stmt, function: FunctionDef
) -> FixOffer:
    name = new_name("lease", function)
    margin = indentation(file.lines[statement.lineno - 1])
    span = file.span(statement)
    start = Edit(Span(file.path, span.line, span.column, span.line, span.column), f"{name} = ")
    end = len(file.lines[span.end_line - 1]) + 1
    text = f"{newline_of(file)}{margin}{way.call.format(name)}"
    release = Edit(Span(file.path, span.end_line, end, span.end_line, end), text)
    safety = Safety.SAFE if way.certain else Safety.UNSAFE
    return FixOffer(safety, "the result is bound to a name and released", (start, release))


def _around(
    file: Parsed, lease: Lease, way: GivingBack, call: ast.Call, statement: ast.stmt, function: FunctionDef
) -> FixOffer | None:
    """The statement in a `with`, or in try/finally after the acquire."""
    span, inner = file.span(statement), file.span(call)
    if not isinstance(statement, SIMPLE) or span.line != span.end_line:
        return None
    name, unit = new_name("buf", function), unit_around(file, statement)
    line = file.lines[span.line - 1]
    margin = indentation(line)
    rest = line[len(margin) : inner.column - 1] + name + line[inner.end_column - 1 :]
    if way.lending and way.certain:
        arguments = line[file.span(call.func).end_column - 1 : inner.end_column - 1]
        lines = [f"with {way.lending}{arguments} as {name}:", unit + rest]
    else:
        acquire, release = f"{name} = {file.source(call)}", way.call.format(name)
        lines = [acquire, "try:", unit + rest, "finally:", unit + release]
    text = newline_of(file).join(margin + each for each in lines)
    edit = Edit(Span(file.path, span.line, 1, span.line, len(line) + 1), text)
    safety = Safety.SAFE if way.certain and _is_used_up(name, lease, rest) else Safety.UNSAFE
    return FixOffer(safety, f"the lease is bound to `{name}` and given back", (edit,))


def _is_used_up(name: str, lease: Lease, text: str) -> bool:
    """Whether the statement keeps and returns nothing that shares the lease's memory."""
    function = ast.parse(f"def f():\n {text}\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    carriers = Carriers(name, lease.value, function.body)
    return not carriers.may_outlive and carriers.names == {name}


def _runs_first(file: Parsed, call: ast.Call, statement: ast.stmt) -> bool:
    """Whether nothing that could have an effect is evaluated before the acquire, and it always is."""
    node: ast.AST = call
    while node is not statement:
        node = file.parents[node]
        if isinstance(node, (*LATER, *SCOPES)):
            return False
    own = set(ast.walk(call))
    before = (
        each
        for each in ast.walk(statement)
        if isinstance(each, (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr))
        and each not in own
    )
    place = (call.end_lineno or 0, call.end_col_offset or 0)
    return all((each.end_lineno or 0, each.end_col_offset or 0) > place for each in before)
