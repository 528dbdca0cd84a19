"""Ends of a record that say nothing of what was said for it: `admit(job)` pins `job.adapter` or takes a
permit, and enters the job; `finish(name)` takes it out and unpins, `abort(name)` takes it out, no more."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.effects import Handle
from auditor.flow.lease import Field, StoredField
from auditor.ir.calls import LOGGING
from auditor.ir.ops import ANY_ITEM
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.counts_at_ends import own_helpers
from auditor.project.fields.forgetting import HANDING_ON, INITIAL
from auditor.project.fields.one_end_forgets import Known, callers
from auditor.project.fields.record_places import TAKING, put_into, tables_filled, takes_from
from auditor.project.fields.ways_out import SAYING
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


def left_by_an_end(
    outcome: Outcome, family: Sequence[Function], project: Project, known: Known
) -> Iterator[StoredField]:
    """Where one table has such records, all from this function, and another end of them gives back."""
    filling, lease = outcome.function, outcome.lease
    if filling.cls is None or outcome.acquisition.foreign or lease.leaks or not lease.handed_over:
        return
    tables = {table for record in _records(outcome) for table in put_into(filling, record)}
    if len(tables) != 1 or any(tables & tables_filled(each) for each in family if each is not filling):
        return
    ends = [each for each in family if each is not filling and takes_from(each, tables)]
    (table,) = tables
    if not any(map(known, ends)):
        return
    for method in ends:
        near = (method, *own_helpers(method, family), *callers(project, method))
        if method.name in INITIAL or any(map(known, near)) or not HANDING_ON.isdisjoint(split(method.name)):
            continue
        if drops(method, table):
            field = Field(filling.cls.qualname, f"{table}{ANY_ITEM}")
            yield StoredField(field, lease.span, partly_by=(method.qualname,))
            return


def _records(outcome: Outcome) -> Iterator[str]:
    """`job` of `pool.pin(job.adapter)`; of what is told nothing, `permits.take()`, whoever is entered."""
    call, function = outcome.call, outcome.function
    match call.args:
        case [ast.Attribute(value=ast.Name(id=record))] if outcome.acquisition.handle is Handle.ARGUMENT:
            yield from () if record == function.owner else (record,)
        case [] if outcome.acquisition.handle is Handle.RECEIVER and not call.keywords:
            yield from function.parameters[1:]


def drops(method: Function, table: str) -> bool:
    """What it takes out goes nowhere: it has no name, or a name of which only fields are asked or set."""
    own = method.owner or ""
    named = {
        target.id: value
        for target, value in assignments(method)
        if isinstance(target, ast.Name) and any(_is_of(each, own, table) for each in walk(value))
    }
    taking = [node for node in method.nodes if _takes(node, own, table)]
    bare = {id(node.value) for node in method.statements if isinstance(node, ast.Expr)}
    struck = {id(each) for node in method.statements if isinstance(node, ast.Delete) for each in node.targets}
    given = {id(value) for value in named.values()}
    if not taking or any(id(node) not in bare | struck | given for node in taking):
        return False
    return not any(_goes_on(node, set(named)) for node in method.nodes)


def _takes(node: ast.AST, own: str, table: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=its, attr=way)) if way in TAKING:
            return _is_of(its, own, table)
        case ast.Subscript(value=its, ctx=ast.Del()):
            return _is_of(its, own, table)
    return False


def _is_of(node: ast.AST, own: str, table: str) -> bool:
    return isinstance(node, ast.expr) and own_attribute(node, own) == table


def _goes_on(node: ast.AST, names: set[str]) -> bool:
    """Somebody is given one of these, or asked by its own method."""
    match node:
        case ast.Call(func=called, args=args, keywords=keywords):
            asked = getattr(getattr(called, "value", None), "id", "") in names
            told = any(_is_named(each, names) for each in (*args, *(keyword.value for keyword in keywords)))
            return asked or (told and last_name(node) not in LOGGING | SAYING)
        case ast.Return(value=value) | ast.Assign(value=value) | ast.Yield(value=value):
            return value is not None and _is_named(value, names)
    return False


def _is_named(value: ast.expr, names: set[str]) -> bool:
    """Itself, or in a tuple or a list."""
    parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
    return any(getattr(part, "id", "") in names for part in parts)
