"""Entries of tables that a method has in its hands, only reads, and puts another one over.

`old = self.slots[name]` is there; so is, on some way to the store, what is asked `if old is not None:`.
Nobody asks whether a thing is there that he believes has been given back."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.follow import known_at_nodes
from auditor.ir.calls import LOGGING
from auditor.ir.ops import ANY_ITEM, Call, Move, Path, Store
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.field_paths import mentions
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.filling_again import (
    Filling,
    attributes_in,
    fillings,
    is_none,
    made_of,
    same,
)
from auditor.project.fields.put_over import OVER
from auditor.project.fields.reckoning import takes_out
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk


def replaces_what_it_saw(filling: Filling, enders: Sequence[Function], ending: Set[str]) -> bool:
    """The entry may be there when it is replaced, and is left to nobody. Where others end what is in the
    table and leave it there, an old one may be an empty shell."""
    if filling.key is None or not leave_no_shells(enders, filling.field):
        return False
    return any(
        _may_be_there(filling, name, surely)
        and _only_read(filling, name, ending, aside=_returned_as_fit(filling, name, enders, ending))
        for name, _, surely in _lookups(filling)
    )


def _returned_as_fit(
    filling: Filling, name: str, enders: Sequence[Function], ending: Set[str]
) -> frozenset[int]:
    """`if found is not None and found.healthy: return found`: one that is not goes on to be replaced. Not
    where the flag may say that it has been ended, as where others ask it before they end one."""
    fit = [
        node
        for node in filling.method.statements
        if isinstance(node, ast.If) and node.lineno < filling.line and _returns(node.body[-1], name)
    ]
    asked_of = [each for node in fit for each in attributes_in(node.test) if _is_part_of(each, name)]
    inner = {id(each.value) for each in asked_of}
    flags = {each.attr for each in asked_of if id(each) not in inner}  # `healthy` of `found.host.healthy`
    asked = any(flag in each.text for flag in flags for each in enders)
    if (
        not flags
        or asked
        or any(OVER.search(flag) or _is_set_by_pool(filling, flag, ending) for flag in flags)
    ):
        return frozenset()
    return frozenset(id(node.body[-1].value) for node in fit if isinstance(node.body[-1], ast.Return))


def _is_set_by_pool(filling: Filling, flag: str, ending: Set[str]) -> bool:
    """By the class with the ends, which may write off all that is lent of the thing."""
    return any(
        isinstance(node.ctx, ast.Store) and node.attr == flag
        for function in filling.method.module.by_node.values()
        if function.name != "__init__"
        if function.cls is not None and not ending.isdisjoint(function.cls.methods)
        for node in attributes_in(function.node)
    )


def _returns(node: ast.stmt, name: str) -> bool:
    """It, or what lies in it: `return found.slot`."""
    value = node.value if isinstance(node, ast.Return) else None
    if isinstance(value, ast.Attribute):
        value = value.value
    return getattr(value, "id", "") == name


def _is_part_of(node: ast.Attribute, name: str) -> bool:
    whose = node.value
    while isinstance(whose, ast.Attribute):
        whose = whose.value
    return getattr(whose, "id", "") == name


def leave_no_shells(enders: Sequence[Function], field: str) -> bool:
    """Each sees to it that what it ends is in the table no more, or calls another one of them for that."""
    at_work = [each for each in enders if mentions(each, field)]
    replacing = {each.name for each in at_work if _replaces(each, field)}
    return all(
        each.name in replacing
        or any(own_attribute(call.func, each.owner or "") in replacing for call in each.calls)
        for each in at_work
    )


def _replaces(ender: Function, field: str) -> bool:
    return takes_out(ender, field) or bool(fillings(ender, ender.owner or "", field))


def fields_inside(outcome: Outcome, table: Path) -> frozenset[str]:
    """`buffer` of `self.rows[key] = Row(buffer)`: where the lease is in the records of the table."""
    places = {*(path for _, path in outcome.stored), *outcome.beside}
    named = (path[3] for path in places if path[:3] == (*table, ANY_ITEM) and len(path) > 3)
    return frozenset(name[1:] for name in named if name.startswith("."))


def empty_a_record(functions: Sequence[Function], inside: Set[str]) -> bool:
    """`row.buffer = None`: a record may stay in its table without the lease."""
    return any(
        isinstance(target, ast.Attribute) and target.attr in inside and is_none(value)
        for function in functions
        for target, value in assignments(function)
        if function.name != "__init__"
    )


def records_looked_up(filling: Filling, inside: Set[str], ending: Set[str]) -> frozenset[int]:
    """Where the method looks up the record that it puts another one over, `old = self.rows[key]`, and carries
    other things of it into the new one: the fields `inside`, where the lease is, it does not even read."""
    return frozenset(
        id(table)
        for name, table, surely in _lookups(filling)
        if _may_be_there(filling, name, surely) and _only_read(filling, name, ending, carries=True)
        if not any(own_attribute(node, name) in inside for node in attributes_in(filling.method.node))
    )


def _lookups(filling: Filling) -> Iterator[tuple[str, ast.expr, bool]]:
    """Names that are given once what stands under the key, the table there, and whether that must be
    something."""
    bound = [n.id for n in filling.method.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    for target, value in assignments(filling.method):
        match value:
            case ast.Subscript(value=table, slice=key):
                surely = True
            case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[key]):
                surely = False
            case _:
                continue
        under = own_attribute(table, filling.owner) == filling.field and _same_key(filling, key)
        before = under and value.lineno < filling.line
        if before and isinstance(target, ast.Name):
            again = getattr(getattr(filling.statement, "value", None), "id", "") == target.id
            if bound.count(target.id) == 1 + again:  # `lease` may be the new one's name further down
                yield target.id, table, surely


def _same_key(filling: Filling, key: ast.expr) -> bool:
    return filling.key is not None and same(made_of(filling.method, key), filling.key)


def _may_be_there(filling: Filling, name: str, surely: bool) -> bool:
    """On some way to the store, and somebody reckons with it."""
    graph = filling.method.graph
    nodes = _where_it_is_bound_again(filling, name) or [
        at for at, op in enumerate(graph.ops) if isinstance(op, Store) and op.at is filling.target
    ]
    known = known_at_nodes(graph) if nodes else {}
    missing = {(f"{name} is None", True), (name, False)}
    asked = surely or any(name in _asked(node) for node in filling.method.nodes)
    return asked and any(missing.isdisjoint(known[at]) for at in nodes if at in known)


def _where_it_is_bound_again(filling: Filling, name: str) -> list[int]:
    """Where the name of the old one becomes that of the new one."""
    if getattr(getattr(filling.statement, "value", None), "id", "") != name:
        return []
    bound = [
        at
        for at, op in enumerate(filling.method.graph.ops)
        if isinstance(op, Call | Move) and op.target == (name,)
    ]
    lines = [getattr(filling.method.graph.ops[at].at, "lineno", 0) for at in bound]
    return [at for at, line in zip(bound, lines, strict=True) if line > min(lines)]


def _asked(node: ast.AST) -> set[str]:
    """Names of which a test asks whether there is anything: `old.key if old is not None else take()`, too."""
    test = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else None
    return {each.id for part in _parts(test) for each in (_of_none(part),) if isinstance(each, ast.Name)}


def _parts(test: ast.expr | None) -> Iterator[ast.expr]:
    match test:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _parts(value)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield from _parts(inner)
        case ast.expr():
            yield test


def _of_none(test: ast.expr) -> ast.expr:
    match test:
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return left
    return test


def _only_read(
    filling: Filling, name: str, ending: Set[str], aside: Set[int] = frozenset(), carries: bool = False
) -> bool:
    """It is asked for, compared, and its fields are read; none of them is kept, handed on or ended. What is
    `aside` is on other ways. `carries`: the new one may go on with what the old one had, if there was one."""
    harmless = set(aside)
    nodes = _while_it_is_the_old_one(filling, name)
    for node in nodes:
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                harmless |= {id(_of_none(part)) for part in _parts(test)}
            case ast.Attribute(value=ast.Name(id=read) as of) if read == name:
                harmless.add(id(of))
    loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name]
    unread = [n for n in loads if isinstance(n.ctx, ast.Load) and id(n) not in harmless]
    instead = not carries and any(_goes_on_instead(node, name) for node in nodes)
    return not (unread or instead or any(_goes_on(node, name, ending) for node in nodes))


def _while_it_is_the_old_one(filling: Filling, name: str) -> list[ast.AST]:
    ops = filling.method.graph.ops
    lines = [getattr(ops[at].at, "lineno", 0) for at in _where_it_is_bound_again(filling, name)]
    until = min(lines, default=None)
    nodes = filling.method.nodes
    return [each for each in nodes if until is None or getattr(each, "lineno", until) < until]


def _goes_on_instead(node: ast.AST, name: str) -> bool:
    """`handle = old.handle if old is not None else take()`"""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.IfExp):
        return False
    return any(_is_field(each, name) for each in (node.value.body, node.value.orelse))


def _goes_on(node: ast.AST, name: str, ending: Set[str]) -> bool:
    """A field of it gets a name of its own, is returned, or given to who may end it; a method of it runs."""
    match node:
        case ast.Assign(targets=[target], value=value):
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            else:
                pairs = [(target, value)]
            return any(_is_field(given, name) and not _copies(to, given) for to, given in pairs)
        case ast.Return(value=value) | ast.Yield(value=value) if value is not None:
            return any(_is_field(each, name) for each in walk(value) if isinstance(each, ast.expr))
        case ast.Call(func=func):
            told = [*node.args, *(keyword.value for keyword in node.keywords)]
            its = isinstance(func, ast.Attribute) and _mentions(func.value, name)
            if its or any(_mentions(each, name) for each in told):
                logs = last_name(node) in LOGGING
                return not logs and (its or last_name(node) in ending or looks_releasing(node))
    return False


def _copies(target: ast.expr, value: ast.expr) -> bool:
    """`slot.users = old.users`: what is known of the old one holds of the new one."""
    return (
        isinstance(target, ast.Attribute) and isinstance(value, ast.Attribute) and target.attr == value.attr
    )


def _is_field(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Attribute) and _mentions(value.value, name)


def _mentions(value: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in walk(value))
