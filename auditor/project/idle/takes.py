"""How something is taken out of a store: by a call that hands it over, or by a name first and out of the
store then (`page = min(self.free)`, `self.free.remove(page)`)."""

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass

from auditor.ir.ops import Call, Delete, InPlace, Move, Store
from auditor.project.code.bindings import assignments, given_to, own_attribute, ways
from auditor.project.code.modules import Function, last_part
from auditor.project.idle.supply import taken_ids
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.pool_state import own_parameters
from auditor.source.nodes import walk

WRITING = (Delete, InPlace, Store)


@dataclass(frozen=True, slots=True)
class Take:
    """`at` takes it out; `name` has it already (a call's result otherwise), `several` of them if that is a
    slice. `shown` is what a finding points to."""

    at: ast.AST
    shown: ast.expr
    name: str = ""
    several: bool = False

    def nodes(self, function: Function) -> list[int]:
        """Where it stands in the flow graph; more than once in a `finally` body."""
        parts = {id(part) for part in walk(self.at)}
        return [
            number
            for number, op in enumerate(function.graph.ops)
            if (isinstance(op, Call) and op.at is self.at)
            or (
                isinstance(self.at, ast.stmt)
                and (isinstance(op, WRITING) or (isinstance(op, Move) and op.target == (self.name,)))
                and id(op.at) in parts
            )
        ]

    @property
    def top(self) -> str | None:
        """The field that says where a pile ends, of `self.pile[self.top]`."""
        match self.shown:
            case ast.Subscript(value=ast.Attribute(), slice=ast.Attribute(attr=top)):
                return top
        return None


def handing_on(work: FieldWork, fields: Set[str]) -> bool:
    """`return self.free.pop()`, `return int(self.free.pop())`, or `page = self.free.pop()` and `return page`:
    to call it is to take."""
    taken = taken_ids(work, fields)
    handed = (_number_in(way) for value in work.returned for way in ways(value))
    return any(id(way) in taken or _is_name_of(work, way, taken) for way in handed)


def _is_name_of(work: FieldWork, value: ast.expr, taken: Set[int]) -> bool:
    """Of what was taken, and of nothing else."""
    given = list(given_to(work.method, value.id)) if isinstance(value, ast.Name) else []
    return bool(given) and all(id(_number_in(each)) in taken for each in given)


def _number_in(value: ast.expr) -> ast.expr:
    match value:
        case ast.Call(func=ast.Name(id="int"), args=[number]):
            return number
    return value


def takes_of(work: FieldWork, fields: Set[str], handing: Set[str]) -> list[Take]:
    """What a method takes out of these stores, itself or by methods that hand on what they take."""
    reader = _Reader(work, fields)
    dropped = {id(node.value) for node in work.method.statements if isinstance(node, ast.Expr)}
    awaited = {id(call.args[0]): call for call in work.method.calls if _waits_for(call)}
    found = [
        Take(awaited.get(id(node), node), node)
        for name, node in work.taken
        if name in fields
        and isinstance(node, ast.Call)
        and id(node) not in dropped
        and _takes_itself(work, node)
    ]
    own = work.method.owner or ""
    found += [
        Take(call, call)
        for call in work.method.calls
        if own_attribute(call.func, own) in handing and id(call) not in dropped
        if not _is_dealt_out(work.method, call)
    ]
    taken = taken_ids(work, fields)
    for node in work.method.statements:
        found += reader.named_first(node)
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Subscript(slice=ast.Attribute()) as value
            ) if id(value) in taken:
                found.append(Take(node, value, name))  # `self.top -= 1`, `page = self.pile[self.top]`
    return found


def _waits_for(call: ast.Call) -> bool:
    """`asyncio.wait_for(self.idle.get(), timeout)`, which answers what the store does."""
    return last_part(call.func) == "wait_for" and bool(call.args)


def _is_dealt_out(method: Function, call: ast.Call) -> bool:
    """`rows = self.take(n)`, and `request.row = rows[at]` for each that wants one: as many as are wanted."""
    names = {
        target.id for target, value in assignments(method) if value is call and isinstance(target, ast.Name)
    }
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Name)
        and getattr(node.value, "id", "") in names
        for node in method.nodes
    )


def _takes_itself(work: FieldWork, call: ast.Call) -> bool:
    """Not `min(self.free)`, which only chooses what `self.free.remove(page)` takes, nor
    `bisect_left(self.sizes, n)`, which says where, nor `list(self.cached)` of a dict, which has its keys."""
    chooses = isinstance(call.func, ast.Name) and call.func.id in ("min", "max", "next", "sorted")
    cls, own = work.method.cls, work.method.owner or ""
    of_table = cls is not None and any(own_attribute(each, own) in cls.tables for each in call.args)
    lists_keys = of_table and isinstance(call.func, ast.Name) and call.func.id in ("list", "tuple")
    return not (chooses or lists_keys or last_part(call.func).startswith("bisect"))


class _Reader:
    """Finds what a name has of a store before it is taken out."""

    def __init__(self, work: FieldWork, fields: Set[str]) -> None:
        self.method = work.method
        self.fields = fields
        self.own = work.method.owner or ""

    def is_store(self, node: ast.AST) -> bool:
        return isinstance(node, ast.expr) and own_attribute(node, self.own) in self.fields

    def named_first(self, statement: ast.stmt) -> Iterator[Take]:
        match statement:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=store, attr="remove" | "discard"), args=[ast.Name(id=name)]
                ) as call
            ) if self.is_store(store) and self._reads_off(name):
                yield Take(call, call, name)
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=store, attr="pop" | "popleft" as way), args=keys
                ) as call
            ) if self.is_store(store):
                end = ast.UnaryOp(ast.USub(), ast.Constant(1)) if way == "pop" else ast.Constant(0)
                yield from (Take(call, call, name) for name in self._at(store, keys[0] if keys else end))
            case ast.Delete(targets=[ast.Subscript(value=store, slice=ast.Slice(lower=None, upper=end))]) if (
                self.is_store(store) and end is not None
            ):
                yield from self._cut(statement, store, end)
            case ast.Delete(targets=[ast.Subscript(value=store, slice=key) as item]) if self.is_store(store):
                yield from (Take(statement, item, name) for name in self._at(store, key))
            case ast.Assign(
                targets=[store], value=ast.Subscript(value=same, slice=ast.Slice(lower=start, upper=None))
            ) if start is not None and self.is_store(store) and ast.dump(same) == _read(store):
                yield from self._cut(statement, same, start)
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=name), store])],
                value=ast.Tuple(
                    elts=[
                        ast.Subscript(
                            value=same, slice=ast.Slice(lower=None, upper=ast.expr() as end)
                        ) as value,
                        ast.Subscript(value=rest, slice=ast.Slice(lower=ast.expr() as start, upper=None)),
                    ]
                ),
            ) if self.is_store(store) and ast.dump(same) == ast.dump(rest) == _read(store):
                if ast.dump(start) == ast.dump(end):  # `pages, self.free = self.free[:n], self.free[n:]`
                    yield Take(statement, value, name, several=True)

    def _cut(self, statement: ast.stmt, store: ast.expr, end: ast.expr) -> Iterator[Take]:
        """`pages = self.free[:n]` beside `del self.free[:n]`, of the same statement list."""
        wanted = ast.dump(ast.Subscript(store, ast.Slice(None, end), ast.Load()))
        for node in self.method.statements:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value):
                    if ast.dump(value) == wanted and node.lineno <= statement.lineno:
                        yield Take(statement, value, name, several=True)

    def _reads_off(self, name: str) -> bool:
        """It is one of those in the store, and was not told."""
        if name in own_parameters(self.method):
            return False
        given = [*given_to(self.method, name), *self._gone_over(name)]
        return bool(given) and all(any(map(self.is_store, walk(value))) for value in given)

    def _gone_over(self, name: str) -> Iterator[ast.expr]:
        for node in self.method.statements:
            if isinstance(node, ast.For) and any(
                isinstance(each, ast.Name) and each.id == name for each in walk(node.target)
            ):
                yield node.iter

    def _at(self, store: ast.expr, key: ast.expr) -> Iterator[str]:
        """Names of what stands in the store at this place."""
        wanted = ast.dump(ast.Subscript(store, key, ast.Load()))
        for node in self.method.statements:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value):
                    if ast.dump(value) == wanted:
                        yield name
                case ast.For(
                    target=ast.Tuple(elts=[ast.Name(id=index), ast.Name(id=name)]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[gone_over]),
                ):
                    if isinstance(key, ast.Name) and key.id == index and _read(gone_over) == _read(store):
                        yield name


def _read(node: ast.expr) -> str:
    """How a field looks where it is read."""
    match node:
        case ast.Attribute(value=value, attr=attr):
            return ast.dump(ast.Attribute(value, attr, ast.Load()))
    return ast.dump(node)
