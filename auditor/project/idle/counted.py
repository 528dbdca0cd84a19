"""Pools that make things on demand up to a limit, and count what they made: a thing that is dropped without
being counted down takes a place of the limit with it."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import own_attribute, suites_of
from auditor.project.code.modules import last_part
from auditor.project.idle.supply import taken_ids
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.made_new import MAKERS, MAKING
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

WITH = (ast.With, ast.AsyncWith)
NO_THINGS = ("Error", "Exception", "Warning", "Empty", "Full", "Exhausted")


def counted(works: Sequence[FieldWork]) -> tuple[frozenset[str], frozenset[str]]:
    """The stores from which a class lends what it made, and the counters of what it made."""
    stores = {name for work in works for name, node in work.taken if isinstance(node, ast.Call)}
    lent = {
        name
        for name in stores
        if any(work.hands_out(taken_ids(work, {name})) for work in works)
        and any(put.field == name and work.is_from_told(put.thing) for work in works for put in work.put)
    }
    counters = {name for work in works for name, way in work.counted if way > 0}
    counters |= {name for work in works for name, way, _ in work.amounts if way > 0}  # of bytes
    counters |= {name for work in works for name, way, _, _ in work.balances if way > 0}  # for each host
    counters |= {name for work in works for name in _raised_by_get(work)}
    made = {name for name in counters - lent if _counts_what_it_makes(works, name, lent)}
    return (frozenset(lent), frozenset(made)) if lent and made else (frozenset(), frozenset())


def _counts_what_it_makes(works: Sequence[FieldWork], counter: str, stores: set[str]) -> bool:
    """Up where one is made, and nowhere else; not down where one is put back: that would be a count of those
    that are lent."""
    up = [(work, suite) for work in works for suite in _changing(work, counter, ast.Add)]
    down = [(work, suite) for work in works for suite in _changing(work, counter, ast.Sub)]
    return (
        any(_is_limited(work, counter) for work in works)
        and all(_makes_there_or_behind(work, suite) and not _takes(work, suite, stores) for work, suite in up)
        and not any(_puts(work, suite, stores) for work, suite in down)
    )


def _changing(work: FieldWork, counter: str, way: type[ast.operator]) -> Iterator[list[ast.stmt]]:
    """The statement lists in which the counter is changed; those under a `with` belong to the list around."""
    own = work.method.owner or ""
    suites = list(suites_of(work.method.node))
    guarded = {id(node.body) for suite in suites for node in suite if isinstance(node, WITH)}
    for suite in (list(_without_guards(suite)) for suite in suites if id(suite) not in guarded):
        for statement in suite:
            match statement:
                case ast.AugAssign(target=target, op=op) if isinstance(op, way):
                    if counted_field(target, own) == counter:
                        yield suite
                case ast.Assign(targets=[ast.Subscript() as target], value=ast.BinOp(op=op)):
                    if isinstance(op, way) and counted_field(target, own) == counter:
                        yield suite


def _raised_by_get(work: FieldWork) -> Iterator[str]:
    """`self.made[host] = self.made.get(host, 0) + 1`"""
    own = work.method.owner or ""
    for node in work.method.statements:
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=table)],
                value=ast.BinOp(left=ast.Call() as before, op=ast.Add(), right=ast.Constant(value=1)),
            ) if (name := own_attribute(table, own)) is not None and counted_field(before, own) == name:
                yield name


def counted_field(target: ast.expr, own: str) -> str | None:
    """`made` of `self.made`, of `self.made[host]`, and of `self.made.get(host, 0)`."""
    match target:
        case ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table, attr="get")):
            return own_attribute(table, own)
    return own_attribute(target, own)


def _without_guards(suite: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in suite:
        if isinstance(statement, WITH):
            yield from _without_guards(statement.body)
        else:
            yield statement


def _makes_there_or_behind(work: FieldWork, suite: list[ast.stmt]) -> bool:
    """Also where the count is raised under a lock, and one is made behind it: `self.made += 1`, `break`."""
    behind = (call for call in work.method.calls if call.lineno > (suite[-1].end_lineno or 0))
    leaves = isinstance(suite[-1], ast.Break)
    return _makes(suite) or (leaves and any(is_maker(last_part(call.func)) for call in behind))


def _makes(suite: list[ast.stmt]) -> bool:
    """Beside the count, or in a `try` beside it, something is made."""
    return any(
        isinstance(node, ast.Call) and is_maker(last_part(node.func))
        for statement in suite
        if not isinstance(statement, (ast.If, ast.For, ast.While, ast.Raise))
        for node in walk(statement)
    )


def is_maker(name: str) -> bool:
    """`Connection`, `make_line`, `torch.empty`."""
    made = name[:1].isupper() and not name.endswith(NO_THINGS)
    return made or name in MAKERS or not MAKING.isdisjoint(split(name))


def _takes(work: FieldWork, suite: list[ast.stmt], stores: set[str]) -> bool:
    """What is taken out is counted with it: unless that is on a way of its own."""
    ids = taken_ids(work, stores)
    return any(
        id(node) in ids
        for statement in suite
        if not isinstance(statement, (ast.If, ast.For, ast.While))
        for node in walk(statement)
    )


def _puts(work: FieldWork, suite: list[ast.stmt], stores: set[str]) -> bool:
    inside = {id(node) for statement in suite for node in walk(statement)}
    return any(put.field in stores and id(put.thing) in inside for put in work.put)


def _terms(side: ast.expr) -> list[ast.expr]:
    """`self.resident` and `size` of `self.resident + size`."""
    match side:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_terms(left), *_terms(right)]
    return [side]


def _is_limited(work: FieldWork, counter: str) -> bool:
    """`if self._made < self._limit:`"""
    own = work.method.owner or ""
    for node in work.method.nodes:
        match node:
            case ast.Compare(
                left=left, ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()], comparators=[right]
            ):
                terms = [part for side in (left, right) for part in _terms(side)]
                if any(counted_field(part, own) == counter for part in terms):
                    return True
    return False
