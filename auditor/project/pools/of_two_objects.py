"""Pairs whose halves belong to two objects: one counts, or enters something, and hands it out, and what it
handed out, or a third object, undoes that.

    class Replicas:                                  class Replica:
        def pick(self):                                  def done(self):
            best = min(self.all, key=load)                   self.in_flight -= 1
            best.in_flight += 1
            return best

    part = ledger.open_part(size)                    settler.settle(part.number)

Two changes of one name say little, so what is found is only proposed, and only where functions ask for the
one and then for the other of what the first gave them.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from auditor.flow.effects import Handle, Position
from auditor.project.code.bindings import TEST_FILE, awaited, root_of, told_by_position
from auditor.project.code.modules import Function, Module, last_part
from auditor.project.pools.bodies import returns_something
from auditor.project.pools.by_belief import SHARED, SHOWING
from auditor.project.pools.by_their_users import ACQUIRING, RELEASING
from auditor.project.pools.halves import LENDING, STRONG, Half, Pair
from auditor.project.pools.lent_kinds import value_of
from auditor.project.shapes.changes import UNDONE_BY, Change, Did, all_changes
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.registers import LISTENERS
from auditor.protocols.vocabulary import split, undoes

WAYS = {
    Did.MORE: re.compile(r"\.(\w+)(?:\[[^\]\n]*\])? \+= "),
    Did.LESS: re.compile(r"\.(\w+)(?:\[[^\]\n]*\])? -= "),
    Did.IN: re.compile(
        r"\.(\w+)(?:\[[^\]\n]*\] = |\.(?:add|append|put|setdefault)\(| = True\b| = [\w.]*\b[A-Z]{2,}\n)"
    ),
    Did.OUT: re.compile(r"\.(\w+)(?:(?:\[[^\]\n]*\])?\.(?:pop|remove|discard)\(|\[[^\]\n]*\](?:\n|$))"),
    Did.CLEAR: re.compile(r"\.(\w+) = (?:False\b|[\w.]*\b[A-Z]{2,}(?:\n|$))"),
}
"""How a text says what is done to what field."""

ENOUGH = 2
"""So many functions ask for both, if their names do not say that the one undoes the other."""

Changed = Mapping[Function, Sequence[Change]]


@dataclass(frozen=True, slots=True)
class Told:
    """How the second is told: as its receiver, or as which argument."""

    handle: Handle
    at: Position = 0


def pairs_of_two_objects(module: Module, known: Set[Function]) -> Iterator[Pair]:
    """Of the functions and methods of one module that are no half of any pair yet."""
    fields = _worked_on_both_ways(module.text)
    if not fields or len(module.classes) < 2:
        return
    changed = {
        function: found
        for function in module.functions.values()
        if _may_be_half(function) and (found := list(_changes(function, fields)))
    }
    asked = {each.name for each in known}
    for begins in [each for each in changed if each not in known and _may_begin(each, asked)]:
        ends = [each for each in changed if each.cls is not begins.cls and _undoes(changed, begins, each)]
        told = {each: way for each in ends if (way := _told(module, begins, each)) is not None}
        if told:
            half = Half(begins, ACQUIRING, value=value_of(begins), by_shape=True)
            back = (Half(each, RELEASING, way.handle, way.at) for each, way in told.items())
            name = begins.cls.name if begins.cls is not None else begins.name
            yield Pair(f"{name}.{begins.name}()", begins.cls, (half,), tuple(back), proposed=True)


def _worked_on_both_ways(text: str) -> Set[str]:
    done = {did: set(pattern.findall(text)) for did, pattern in WAYS.items()}
    return (done[Did.MORE] & done[Did.LESS]) | (done[Did.IN] & (done[Did.OUT] | done[Did.CLEAR]))


def _may_be_half(function: Function) -> bool:
    name = function.name
    hidden = name.startswith("_") or function.parent is not None or function.is_abstract
    return not (hidden or SHARED.match(name) or not LENDING.isdisjoint(function.decorators))


def _may_begin(function: Function, pools: Set[str]) -> bool:
    """Not what hands on the lease of a pool that it asks: `return Proposal(self.pool.rent(n))`."""
    names = {last_part(call.func) for call in function.calls}
    asks = not names.isdisjoint(pools) or any(not STRONG.isdisjoint(split(name)) for name in names)
    return returns_something(function) and not asks


def _changes(function: Function, fields: Set[str]) -> Iterator[Change]:
    """What it does itself, and what the methods do that it asks of others: `self.ledger._strike(number)`."""
    asked = [function]
    for call in function.calls:
        match call.func:
            case ast.Attribute(value=ast.Attribute(), attr=name):
                asked += [each for cls in function.module.classes.values() if (each := cls.methods.get(name))]
    for each in asked:
        if any(field in each.text for field in fields):
            yield from (
                change
                for change in all_changes(each)
                if len(change.way) > 1 and change.way[-1] in fields and not LISTENERS.search(change.way[-1])
            )


def _undoes(changed: Changed, begins: Function, ends: Function) -> bool:
    return not SHOWING.match(ends.name) and any(
        one.way[-1] == other.way[-1] and other.did in UNDONE_BY.get(one.did, ())
        for one in changed[begins]
        if one.did in WAYS
        for other in changed[ends]
    )


# How those who ask for both tell the second -----------------------------------------------------------------


def _told(module: Module, begins: Function, ends: Function) -> Told | None:
    ways = Counter(
        way
        for function in module.functions.values()
        if all(f"{half.name}(" in function.text for half in (begins, ends))
        and function not in (begins, ends)
        and not TEST_FILE.search(module.path)
        and (way := _told_in(function, begins, ends)) is not None
    )
    enough = 1 if undoes(ends.name, begins.name) else ENOUGH
    most = min(ways, key=lambda way: (-ways[way], str(way)), default=None)
    return most if most is not None and sum(ways.values()) >= enough else None


def _told_in(function: Function, begins: Function, ends: Function) -> Told | None:
    """Behind the first, of what that gave."""
    begun = function.calling(begins.name)
    names = {name for node in function.nodes for name, value in _named(node) if awaited(value) in begun}
    for call in function.calling(ends.name):
        if not begun or call.lineno <= begun[0].lineno:
            continue
        if isinstance(call.func, ast.Attribute) and root_of(call.func.value) in names:
            return Told(Handle.RECEIVER)
        told = own_parameters(ends)
        for at, given in told_by_position(call):
            if root_of(given) in names:
                position = told[at] if isinstance(at, int) and 0 < at < len(told) else at
                return Told(Handle.RESULT, position)
    return None


def _named(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value)
            | ast.NamedExpr(target=ast.Name(id=name), value=value)
        ):
            yield name, value
