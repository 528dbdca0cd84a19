"""Lists of leases of which one is put in the place of another: `table[-1] = fresh`, where the method asks how
many have the block that is there, `if table[-1].users > 1:`, and drops its own share of it nowhere. So do
`if not pool.is_shared(last): return` and `if pool.refs[last] == 1: return`, of what goes by its number."""

import ast
import re
from collections.abc import Callable, Iterator, Set

from auditor.project.code.bindings import assignments, given_to
from auditor.project.code.modules import Function, last_part
from auditor.project.code.release_names import ENDING
from auditor.project.fields.filling_again import Filling, same
from auditor.project.fields.outgrown import CLOCKS
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

SHARED = frozenset(
    {"shared", "sharing", "exclusive", "unique", "private", "ref", "refs", "refcount", "refcounts", "refcnt",
     "count", "counts", "users", "owners", "holders", "readers"}
)  # fmt: skip
"""Words of what tells whether others have it."""

COPYING_ON_WRITE = re.compile(r"_*(?:cow|copy_on_write|unshare|make_(?:writable|private))(?:_|$)")

NOTING = frozenset({"append", "print", "len", "debug", "info", "int", "hash"})


def put_in_its_place(
    method: Function, call: ast.Call, ends: Set[str], callers_end: Callable[[], bool]
) -> Iterator[Filling]:
    """Of what the call lends. `ends` are the names of what gives back to its pool, which callers may do who
    are told both, `return last, fresh`."""
    for target, value in assignments(method):
        match target:
            case ast.Subscript(value=table, slice=index) if target.lineno >= call.lineno:
                place = _field_of(method, table)
                if place is None or isinstance(index, ast.Slice) or not _comes_of(method, value, call):
                    continue
                here = _Place(method, table, index, call)
                if here.is_asked_before(target.lineno) and not here.is_given_away(ends, call, callers_end):
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

    def __init__(self, method: Function, table: ast.expr, index: ast.expr, lending: ast.Call) -> None:
        self.method = method
        self.table = table
        self.index = index
        self.new = {t.id for t, value in assignments(method) if isinstance(t, ast.Name) and value is lending}
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
        `last.expires < now`, after which it is over. A method by the name of `copy_on_write` need not ask."""
        tests = [
            node.test for node in self.method.statements if isinstance(node, ast.If) and node.lineno < line
        ]
        if COPYING_ON_WRITE.match(self.method.name):
            return True
        return any(
            self._is_counted(asked) if isinstance(asked, ast.Compare) else self._asks_the_pool(asked)
            for test in tests
            for asked in walk(test)
        ) and not any(self._asks_for_none_left(test) for test in tests)

    def _is_counted(self, compared: ast.Compare) -> bool:
        sides = (compared.left, *compared.comparators)
        if any(isinstance(side, ast.Constant) and not side.value for side in sides):
            return False
        words = {
            word for node in walk(compared) for word in split(getattr(node, "id", getattr(node, "attr", "")))
        }
        asked = any(isinstance(side, ast.Attribute) and self._is_meant(side.value) for side in sides)
        asked = asked or any(map(self._asks_the_pool, sides))
        return asked and CLOCKS.isdisjoint(words)

    def _asks_the_pool(self, node: ast.AST) -> bool:
        """`pool.is_shared(last)`, `pool.refs[last]`"""
        match node:
            case ast.Call(func=asked, args=[it]) | ast.Subscript(value=asked, slice=it):
                return self._is_meant(it) and not SHARED.isdisjoint(split(last_part(asked)))
        return False

    def _asks_for_none_left(self, test: ast.expr) -> bool:
        """`pool.refs[last] <= 0`"""
        return any(
            isinstance(node, ast.Compare)
            and any(
                isinstance(side, ast.Constant) and not side.value for side in (node.left, *node.comparators)
            )
            and any(map(self._asks_the_pool, (node.left, *node.comparators)))
            for node in walk(test)
        )

    def is_given_away(self, ends: Set[str], lending: ast.Call, callers_end: Callable[[], bool]) -> bool:
        """To a call, under another name, to the caller; or its count is lowered here. What is read off it
        tells of it, and of `free(last.number)` too it is the block that goes."""
        for node in self.method.statements:
            match node:
                case ast.AugAssign(
                    target=ast.Attribute(value=it) | ast.Subscript(slice=it), op=ast.Sub()
                ) if self._is_meant(it):
                    return True
                case ast.Assign(targets=[ast.Subscript(slice=it)]) if self._is_meant(it):
                    return True
                case ast.Return(value=ast.Tuple() as pair) if self._is_with_the_new(pair):
                    if callers_end():
                        return True
                case ast.Return(value=ast.expr() as value) if self._is_held_by(value):
                    return True
                case ast.Assign(value=value) if self._is_held_by(value) and not self._is_it(value):
                    return True
        for call in self.method.calls:
            if self._asks_the_pool(call):
                continue
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
        """It, and not only what is read off it, or what lies in some memory under its number."""
        read_off = {id(each.value) for each in walk(value) if isinstance(each, ast.Attribute)}
        read_off |= {id(each.slice) for each in walk(value) if isinstance(each, ast.Subscript)}
        read_off |= {id(part) for each in walk(value) if self._asks_the_pool(each) for part in walk(each)}
        return any(self._is_meant(each) and id(each) not in read_off for each in walk(value))

    def _is_with_the_new(self, pair: ast.Tuple) -> bool:
        return any(getattr(each, "id", "") in self.new for each in pair.elts)
