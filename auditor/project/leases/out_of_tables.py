"""What methods take out of tables of their object, or of a record that they are told, where the class gives
back what lies there: whoever takes an entry out owes it from then on.

    def drop_parked(self, key, notify):            def close(self):
        blocks = self.parked.pop(key)                  for blocks in self.parked.values():
        if notify and not self.heard(key):                 self.pool.free(blocks)
            return
        self.pool.free(blocks)

Nobody needs to know who has put it there: those who give it back believe that it is owed (`second_hand`)."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from auditor.ir.ops import Path
from auditor.ir.tables import GOING_OVER
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.leases.given_back import given_back_in, lends
from auditor.project.leases.second_hand import handed_over
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import functions_with
from auditor.project.meaning.source import Source
from auditor.project.meaning.summaries import said_absent
from auditor.project.pools.halves import Pair
from auditor.source.nodes import walk


class TakenOut(NamedTuple):
    """`believed`: it is another method that gives back what lies there. `put`: acquires of what lies in the
    field of each entry."""

    function: Function
    call: ast.Call
    source: Source
    believed: bool
    put: tuple[ast.Call, ...]


def out_of_tables(recogniser: Recogniser) -> Iterator[TakenOut]:
    """Each once, those first that give it back themselves."""
    words = {function.name for function, (pair, _) in recogniser.releasing.items() if lends(pair)}
    found: list[TakenOut] = []
    for module in list(recogniser.calls.model.project.parsed()):
        for function, calls in functions_with(module, words) if ".pop" in module.text else ():
            for container, pair, name, rest in _given_back(recogniser, function, calls):
                if function.cls is None or function.cls in recogniser.pools:
                    continue  # its own stores `idle` asks about
                put = tuple(each for own in _methods(function) for each in _put_with(own, container, rest))
                if rest and not put:
                    continue
                for method in function.cls.methods.values():
                    for bound, call in _taken_out_of(method, container):
                        itself = method is function and bound == name
                        if rest and _sees_to(recogniser, method, bound):
                            continue
                        if not _come_together(method, bound):
                            found.append(TakenOut(method, call, handed_over(pair, rest), not itself, put))
    yield from sorted(found, key=lambda each: each.believed)


def _given_back(
    recogniser: Recogniser, function: Function, calls: list[ast.Call]
) -> Iterator[tuple[str, Pair, str, Path]]:
    """Containers of which an entry is given back, or a field of one, as they are written, the name of that
    entry and the field."""
    for thing, pair in given_back_in(recogniser, function, calls):
        if len(thing) == 1 or thing[1].startswith("."):
            for container in _containers(function, thing[0]):
                yield container, pair, thing[0], thing[1:]
    for call in calls:
        pairs = [
            recogniser.releasing[target][0]
            for target in recogniser.calls.targets(function, call)[0]
            if target in recogniser.releasing
        ]
        for told in call.args[:1] if len(pairs) == 1 and lends(pairs[0]) else ():
            if (table := _table_of(function, told)) is not None:
                yield table, pairs[0], "", ()


def _methods(function: Function) -> list[Function]:
    return list(function.cls.methods.values()) if function.cls is not None else []


def _put_with(method: Function, container: str, field: Path) -> Iterator[ast.Call]:
    """`req.slot = self.bank.attach(name)`, and `self.running[req.id] = req`: no entry is without."""
    entered = {
        value.id
        for target, value in assignments(method)
        if isinstance(target, ast.Subscript) and isinstance(value, ast.Name)
        if ast.unparse(target.value) == container
    }
    for target, value in assignments(method) if entered else ():
        match target:
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in entered and isinstance(
                value, ast.Call
            ):
                if (f".{attr}",) == field:
                    yield value


def _containers(function: Function, name: str) -> Iterator[str]:
    """Those that it is taken out of, or that a loop goes over; of what it is told, those that it strikes it
    off."""
    if name in function.parameters:
        yield from _struck_off(function, name)
    for target, value in assignments(function):
        if isinstance(target, ast.Name) and target.id == name and (table := _table_of(function, value)):
            yield table
    for node in function.statements:
        match node:
            case (
                ast.For(target=ast.Name(id=turn), iter=over)
                | ast.For(target=ast.Tuple(elts=[_, ast.Name(id=turn)]), iter=over)
            ) if turn == name:
                if (gone_over := _gone_over(function, over)) is not None and _is_field(function, gone_over):
                    yield ast.unparse(gone_over)


def _struck_off(function: Function, name: str) -> Iterator[str]:
    """`del self.running[req.id]`, `self.running.pop(req.id)`"""
    for node in function.nodes:
        match node:
            case (
                ast.Delete(targets=[ast.Subscript(value=table, slice=key)])
                | ast.Call(func=ast.Attribute(value=table, attr="pop"), args=[key, *_])
            ):
                said = any(isinstance(each, ast.Name) and each.id == name for each in walk(key))
                if said and _is_field(function, table):
                    yield ast.unparse(table)


def _gone_over(function: Function, over: ast.expr) -> ast.expr | None:
    """`self.parked` of `list(self.parked.values())`; of a list itself, but not of the keys of a table."""
    match over:
        case ast.Call(func=ast.Name(id=around), args=[inner, *_]) if around in GOING_OVER:
            return _gone_over(function, inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="values" | "items"), args=[]):
            return inner
        case ast.Attribute(attr=name):
            keyed = function.cls is None or name in function.cls.tables
            return None if keyed else over
    return None


def _table_of(function: Function, value: ast.expr) -> str | None:
    """`self.parked` of `self.parked.pop(key)`."""
    match value:
        case ast.Call(func=ast.Attribute(value=table, attr="pop" | "popleft")) if _is_field(function, table):
            return ast.unparse(table)
    return None


def _is_field(function: Function, table: ast.expr) -> bool:
    """Of the method's own object, or of what it is told."""
    return (
        isinstance(table, ast.Attribute)
        and isinstance(table.value, ast.Name)
        and table.value.id in function.parameters
    )


def _taken_out_of(method: Function, container: str) -> Iterator[tuple[str, ast.Call]]:
    """Under a name of its own."""
    for target, value in assignments(method):
        taken = isinstance(value, ast.Call) and _table_of(method, value) == container
        if isinstance(target, ast.Name) and isinstance(value, ast.Call) and taken:
            yield target.id, value


def _sees_to(recogniser: Recogniser, method: Function, record: str) -> bool:
    """Whether it gives back something of the record, or tells others of it: what it leaves may be seen to."""
    told = any(isinstance(arg, ast.Name) and arg.id == record for call in method.calls for arg in call.args)
    return told or any(thing[0] == record for thing, _ in given_back_in(recogniser, method, method.calls))


def _come_together(function: Function, name: str) -> bool:
    """`if left is None or right is None: return` of two that are put there together."""
    for node in function.statements:
        match node:
            case ast.If(test=ast.BoolOp(op=ast.Or(), values=values)):
                absent = [said_absent(value) for value in values]
                if name in absent and None not in absent:
                    return True
    return False
