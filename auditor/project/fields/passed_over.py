"""Tables that a loop goes over for the last time, where some entries are passed over: `for rank, row in
self.rows.items(): if rank == self.rank: continue; pool.put(row)`, and then `self.rows.clear()`; or where only
some go back, `if row.dirty: pool.put(row)`; or where it stops at the first that fails."""

import ast
from collections.abc import Iterator, Set

from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import assigned_by, own_attribute, suites_of
from auditor.project.code.modules import Function
from auditor.project.fields.cleared_beside_others import empties
from auditor.project.fields.half_emptied import TELLING
from auditor.project.fields.swept_in_part import asks_what_nobody_asked
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

GONE = frozenset({"released", "freed", "closed", "done", "finished", "returned", "owned", "owns", "own",
                  "shared", "borrowed", "external", "none", "gone", "dead", "held", "isinstance", "lease",
                  "leased"})  # fmt: skip
"""Words of what says that there is no lease in an entry, or that somebody else ends it."""

STATES = frozenset({"pin", "pins", "pinned", "ref", "refs", "users", "uses", "count", "lock", "locked",
                    "active", "running", "open", "opened", "started", "live", "idle", "used", "busy", "full",
                    "empty", "state", "status"})  # fmt: skip
"""Words of what changes with the lease itself, or when it goes back."""


def passed_over_and_cleared(
    method: Function, attribute: str, ends: Set[str], storing: Function
) -> Iterator[ast.stmt]:
    """The statements that empty the table behind such a loop, or before it: `batch, self.batch = self.batch,
    []`."""
    own = method.owner or ""
    for suite in suites_of(method.node):
        for at, loop in enumerate(suite):
            if not isinstance(loop, ast.For) or loop.orelse:
                continue
            moved = _is_of_what_it_was(loop.iter, suite[:at], own, attribute)
            if not moved and not _is_over(loop.iter, own, attribute):
                continue
            names = {node.id for node in walk(loop.target) if isinstance(node, ast.Name)}
            plain = asks_what_nobody_asked(loop, attribute, storing)
            some = _passes_over(loop.body, names, ends, plain=plain) or _only_some(loop.body, names, ends)
            if some or _stops(loop, names, ends):
                there = suite[:at] if moved else suite[at + 1 :]
                yield from (each for each in there if empties(each, own, attribute))


def _is_of_what_it_was(over: ast.expr, before: list[ast.stmt], own: str, attribute: str) -> bool:
    """A local name has what was in the table, and the table is empty."""
    given = [pair for statement in before for pair in assigned_by(statement)]
    named = any(
        isinstance(over, ast.Name)
        and isinstance(to, ast.Name)
        and to.id == over.id
        and own_attribute(value, own) == attribute
        for to, value in given
    )
    return named and any(empties(statement, own, attribute) for statement in before)


def _is_over(over: ast.expr, own: str, attribute: str) -> bool:
    match over:
        case ast.Call(func=ast.Attribute(value=table, attr="values" | "items"), args=[]):
            return own_attribute(table, own) == attribute
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner]):
            return _is_over(inner, own, attribute)
    return own_attribute(over, own) == attribute


def _passes_over(body: list[ast.stmt], names: set[str], ends: Set[str], *, plain: bool) -> bool:
    """One test decides that a turn goes on before it gives its entry back, and nothing else is done then.
    A `plain` one asks of what came with the lease, and says nothing of the lease by whatever words."""
    tests = [each for each in body if isinstance(each, ast.If)]
    if len(tests) != 1 or tests[0].orelse or _offers(tests[0].test, names):
        return False
    (test,) = tests
    *said, last = test.body
    quiet = all(isinstance(each, ast.Expr) and _only_says(each.value) for each in said)
    behind = body[body.index(test) + 1 :]
    words = {word for node in walk(test.test) for word in split(_named(node))}
    ended = any(_ends(each, names, ends) for each in behind)
    before = any(_ends(each, names, ends) for each in body[: body.index(test)])
    return isinstance(last, ast.Continue) and quiet and ended and not before and (plain or not GONE & words)


def _offers(test: ast.expr, names: set[str]) -> bool:
    """`if sink.take(row): continue`: who says yes has it then."""
    told = (arg for node in walk(test) if isinstance(node, ast.Call) for arg in node.args)
    return any(isinstance(node, ast.Name) and node.id in names for arg in told for node in walk(arg))


def _only_some(body: list[ast.stmt], names: set[str], ends: Set[str]) -> bool:
    """`if row.dirty: pool.put(row)`, by a field that says nothing of the lease, and nothing for others."""
    match body:
        case [ast.If(test=test, body=[*said, last], orelse=[])]:
            pass
        case _:
            return False
    match test:
        case ast.Attribute(value=ast.Name(id=name)) | ast.Subscript(slice=ast.Name(id=name)):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(value=ast.Name(id=name))):
            pass
        case ast.Compare(
            left=ast.Attribute(value=ast.Name(id=name)) | ast.Subscript(slice=ast.Name(id=name)),
            ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()],
            comparators=[ast.Name() | ast.Attribute()],  # `row.slot >= 0` asks whether there is one
        ):  # `self.stamps[name] < before`: how old it is says nothing of whose it is
            pass
        case _:
            return False
    words = {word for node in walk(test) for word in split(_named(node))}
    told = TELLING.isdisjoint(words) and (GONE | STATES).isdisjoint(words)
    quiet = not any(isinstance(node, ast.Break | ast.Return) for each in body for node in walk(each))
    return name in names and told and quiet and any(_ends(each, names, ends) for each in (*said, last))


def _stops(loop: ast.For, names: set[str], ends: Set[str]) -> bool:
    """`except OSError: ok = False; break`, of a loop that gives back each entry it comes to."""
    inner = {
        id(node)
        for each in walk(loop)
        if each is not loop and isinstance(each, ast.For | ast.While | ast.AsyncFor)
        for node in walk(each)
    }
    stops = any(isinstance(node, ast.Break) and id(node) not in inner for node in walk(loop))
    return stops and any(_ends(each, names, ends) for each in loop.body)


def _only_says(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and last_name(value) in LOGGING


def _ends(statement: ast.stmt, names: set[str], ends: Set[str]) -> bool:
    return any(
        last_name(node) in ends and any(isinstance(n, ast.Name) and n.id in names for n in walk(node))
        for node in walk(statement)
        if isinstance(node, ast.Call)
    )


def _named(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and node.value is None:
        return "none"
    return getattr(node, "attr", getattr(node, "id", ""))
