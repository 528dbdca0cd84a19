"""Lists of leases of which one is put in the place of another: `table[-1] = fresh`, where the method asks how
many have the block that is there, `if table[-1].users > 1:`, and drops its own share of it nowhere."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, given_to
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING
from auditor.project.fields.filling_again import Filling, same
from auditor.project.fields.outgrown import CLOCKS
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

NOTING = frozenset({"append", "print", "len", "debug", "info", "int", "hash"})


def put_in_its_place(method: Function, call: ast.Call, ends: Set[str]) -> Iterator[Filling]:
    """Of what the call lends. `ends` are the names of what gives back to its pool."""
    for target, value in assignments(method):
        match target:
            case ast.Subscript(value=table, slice=index) if target.lineno >= call.lineno:
                place = _field_of(method, table)
                if place is None or isinstance(index, ast.Slice) or not _comes_of(method, value, call):
                    continue
                here = _Place(method, table, index)
                if here.is_asked_before(target.lineno) and not here.is_given_away(ends, call):
                    statement = next(n for n in method.statements if target in getattr(n, "targets", ()))
                    yield Filling(method, *place, statement, target, index)


def _field_of(method: Function, table: ast.expr) -> tuple[str, str] | None:
    """`sequence` and `table` of `sequence.table`; of a local name what it was given, once:
    `table = self.tables[key]`."""
    if isinstance(table, ast.Name):
        given = list(given_to(method, table.id))
        if len(given) != 1:
            return None
        table = given[0].value if isinstance(given[0], ast.Subscript) else given[0]
    match table:
        case ast.Attribute(value=ast.Name(id=owner), attr=field):
            return owner, field
    return None


def _comes_of(method: Function, value: ast.expr, call: ast.Call) -> bool:
    """The call itself, a name of it, or its first: `fresh[0]`."""
    root = value.value if isinstance(value, ast.Subscript) else value
    given = list(given_to(method, root.id)) if isinstance(root, ast.Name) else [root]
    return any(each is call for each in given)


class _Place:
    """One place of the list, and the names of what was there."""

    def __init__(self, method: Function, table: ast.expr, index: ast.expr) -> None:
        self.method = method
        self.table = table
        self.index = index
        self.names = {
            t.id for t, value in assignments(method) if isinstance(t, ast.Name) and self._is_it(value)
        }
        for loop in method.statements:
            match loop:
                case ast.For(
                    target=ast.Tuple(elts=[ast.Name() as number, ast.Name(id=each)]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[over]),
                ) if same(over, table) and same(number, index):
                    self.names.add(each)

    def _is_it(self, node: ast.AST) -> bool:
        match node:
            case ast.Subscript(value=table, slice=index):
                return same(table, self.table) and same(index, self.index)
        return False

    def _is_meant(self, node: ast.AST) -> bool:
        return self._is_it(node) or (isinstance(node, ast.Name) and node.id in self.names)

    def is_asked_before(self, line: int) -> bool:
        """`if last.users > 1:`, `if table[-1].users == 1: return`; not `last.users <= 0`, nor
        `last.expires < now`, after which it is over."""
        return any(
            self._is_counted(compared)
            for node in self.method.statements
            if isinstance(node, ast.If) and node.lineno < line
            for compared in walk(node.test)
            if isinstance(compared, ast.Compare)
        )

    def _is_counted(self, compared: ast.Compare) -> bool:
        sides = (compared.left, *compared.comparators)
        if any(isinstance(side, ast.Constant) and not side.value for side in sides):
            return False
        words = {
            word for node in walk(compared) for word in split(getattr(node, "id", getattr(node, "attr", "")))
        }
        asked = any(isinstance(side, ast.Attribute) and self._is_meant(side.value) for side in sides)
        return asked and CLOCKS.isdisjoint(words)

    def is_given_away(self, ends: Set[str], lending: ast.Call) -> bool:
        """To a call, under another name, to the caller; or its count is lowered here. What is read off it
        tells of it, and of `free(last.number)` too it is the block that goes."""
        for node in self.method.statements:
            match node:
                case ast.AugAssign(target=ast.Attribute(value=it)) if self._is_meant(it):
                    return True
                case ast.Return(value=ast.expr() as value) if self._is_held_by(value):
                    return True
                case ast.Assign(value=value) if self._is_held_by(value) and not self._is_it(value):
                    return True
        for call in self.method.calls:
            name = last_name(call)
            told = (*call.args, *(keyword.value for keyword in call.keywords))
            if name not in NOTING - {"append"} and any(self._is_held_by(each) for each in told):
                return True
            if (name in ends or ENDING.search(name)) and any(map(self._is_meant, walk(call))):
                return True
            if name not in NOTING and call is not lending and any(map(self._is_around, told)):
                return True
        return False

    def _is_around(self, told: ast.expr) -> bool:
        """`self._drop(essay, at)`: the list itself, or whose it is."""
        owner = self.table.value if isinstance(self.table, ast.Attribute) else self.table
        return isinstance(told, ast.expr) and (same(told, self.table) or same(told, owner))

    def _is_held_by(self, value: ast.expr) -> bool:
        """It, and not only what is read off it."""
        read_off = {id(each.value) for each in walk(value) if isinstance(each, ast.Attribute)}
        return any(self._is_meant(each) and id(each) not in read_off for each in walk(value))
