"""Counts that go down and up by amounts: what is handed out for an amount says how much goes back."""

import ast
from collections.abc import Iterable, Iterator, Sequence, Set

from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork, field_work
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.pool_state import own_parameters


def takes_an_amount(taker: Function) -> bool:
    """`reserve(rows)` does `self.rows -= rows`."""
    told = own_parameters(taker)[:1]
    return any(isinstance(value, ast.Name) and value.id in told for _, _, value in field_work(taker).amounts)


def amount_beside_a_name(taker: Function, partners: Iterable[Function]) -> int | None:
    """Where `tokens` stands in `charge(tenant, tokens)`, if `credit(tokens)` adds it again, and no more."""
    told = own_parameters(taker)
    work = [(field, -way, value) for field, way, value in field_work(taker).amounts]
    for partner in partners:
        back = {(field, way) for field, way, value in field_work(partner).amounts if _is_told(partner, value)}
        if told[:1] and told[0] not in own_parameters(partner):
            for field, way, value in work:
                if (field, way) in back and isinstance(value, ast.Name) and value.id in told[1:]:
                    return told.index(value.id)
    return None


def _is_told(function: Function, value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in own_parameters(function)[:1]


def returns_the_amount(taker: Function) -> bool:
    """`self.left -= granted; return granted`; what is not there is told by a constant."""
    work = field_work(taker)
    return _returns_one_of(work, {ast.unparse(value) for _, way, value in work.amounts if way < 0})


def returns_what_it_adds(taker: Function, partners: Iterable[Function]) -> bool:
    """`self.out += granted; return granted`, of what a partner subtracts again: the amount is the lease."""
    work = field_work(taker)
    lowered = {field for partner in partners for field, way, _ in field_work(partner).amounts if way < 0}
    return _returns_one_of(
        work, {ast.unparse(value) for field, way, value in work.amounts if way > 0 and field in lowered}
    )


def _returns_one_of(work: FieldWork, amounts: Set[str]) -> bool:
    told = {ast.unparse(value) for value in work.returned if not isinstance(value, ast.Constant)}
    return bool(told) and told <= amounts


def carries_the_amount(taker: FieldWork, giver: FieldWork, counter: str) -> bool:
    """`self.units -= n; return Grant(n)` and `self.units += grant.units`: the object says how much."""
    taken = [[value] for field, _, value in taker.amounts if field == counter]
    back = [value for field, _, value in giver.amounts if field == counter]
    return _notes(taker, taken) and any(_reads(giver, value) for value in back)


def tickets(
    lending: Sequence[FieldWork], given: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, list[FieldWork]]]:
    """`self.left[team] -= n; return Hold(team, n)`, refused where too little is left, and
    `self.left[hold.team] += hold.n - used`: the object says whose and how much."""
    for taker in lending:
        lowered = {
            (field, way)
            for field, way, key, value in taker.balances
            if _notes(taker, [[key, value]]) and _is_asked(taker, field)
        }
        givers = [
            work
            for work in (given if lowered else ())
            if work is not taker
            and any((field, -way) in lowered and _reads(work, key) for field, way, key, _ in work.balances)
        ]
        if givers:
            yield taker, givers


def _notes(taker: FieldWork, taken: Sequence[Sequence[ast.expr]]) -> bool:
    """An object is made that is told all of these that are no constants."""
    wanted = [{ast.unparse(each) for each in some if not isinstance(each, ast.Constant)} for some in taken]
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id[:1].isupper()
        and any(some and some <= {ast.unparse(given) for given in _arguments(node)} for some in wanted)
        for node in taker.method.nodes
    )


def _reads(giver: FieldWork, value: ast.expr) -> bool:
    """A field of what it is told: `hold.n`, or `back = hold.n - used`."""
    fields = (node for node in giver.method.nodes if isinstance(node, ast.Attribute))
    read = {id(node) for node in fields if isinstance(node.value, ast.Name) and node.value.id in giver.told}
    return mentions(value, giver.derived(frozenset(), read), read)


def _is_asked(work: FieldWork, field: str) -> bool:
    """`if self.left[team] < n: return None`, or what was read there before is asked."""
    shown = {id(node) for node in work.method.nodes if isinstance(node, ast.Attribute) and node.attr == field}
    names = work.derived(frozenset(), shown)
    return any(
        mentions(node.test, names, shown)
        for node in work.method.nodes
        if isinstance(node, ast.If | ast.While | ast.Assert)
    )


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
