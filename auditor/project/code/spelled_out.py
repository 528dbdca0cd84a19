"""Calls that a file makes in other words, told in plain ones before anything else reads its tree.

    self.fresh                 # self.fresh(), of `@property def fresh(self): return self.pool.lease()`
    self.draw_beacon(channel)  # self.book.draw(channel, millis=12), of a `partial` in a field
    self.claimers["tx"]()      # self._claim_marked(), of a table of functions
    self.handlers[kind](desc)  # self._on_data(desc) if kind == "data" else self._on_stats(desc)

Only what the file itself says is used, so that its tree depends on nothing else."""

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from auditor.project.code.modules import last_part
from auditor.protocols.vocabulary import ACQUIRE_WORDS, take_apart
from auditor.source.nodes import statements_below, walk

MOST = 8
"""A table of more entries is left as it is."""

TABLE = re.compile(r"= \{([^{}]{1,800})\}")
PARTIAL = re.compile(r"= (?:functools\.)?partial\((?:\w+\.)*(\w+)")
OF_FUNCTIONS = re.compile(r"\s*[\"'\w.]+:\s*(?:lambda\b|[A-Za-z_][\w.]*\s*(?:,|$))")
IN_A_TABLE = re.compile(r"(\w+)\s*(?:,|$)|(\w+)\(", re.MULTILINE)
PROPERTY = re.compile(r"@property\n[ \t]+def (\w+)")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Table = Mapping[str, tuple[ast.expr, ast.expr]]
"""By the text of their keys, the keys and what lies there."""


def names_behind(text: str) -> Iterator[str]:
    """Last names of what may be called in other words."""
    for table in _tables_in(text):
        for found in IN_A_TABLE.finditer(table):
            yield found[1] or found[2]
    yield from PARTIAL.findall(text)
    if "@property" in text:
        yield from PROPERTY.findall(text)


def _tables_in(text: str) -> Iterator[str]:
    """What stands between their brackets."""
    return (table for table in TABLE.findall(text) if OF_FUNCTIONS.match(table))


def spell_out(tree: ast.Module, text: str) -> list[tuple[int, str]]:
    """Rewrites the tree; the lines and last names of the calls that now stand in it."""
    named = any(True for _ in _tables_in(text))
    tables = (
        {name: table for name, value in _assigned(tree.body) if (table := _table(value))} if named else {}
    )
    reads = _lending_properties(tree, text) if "@property" in text else set()
    if not (named or reads or PARTIAL.search(text)):
        return []
    written: list[tuple[int, str]] = []
    for cls in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        own = _Own(cls)
        for method in own.methods.values() if tables or reads or own.has_functions() else ():
            _Speller(own, tables, reads, written).function(method)
    for function in tree.body if tables or reads else ():
        if isinstance(function, FunctionNode):
            _Speller(None, tables, reads, written).function(function)
    return written


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _table(value: ast.expr) -> Table:
    """`{"data": self._on_data, "pause": self._on_pause}`, of functions alone."""
    if not isinstance(value, ast.Dict) or not 0 < len(value.keys) <= MOST:
        return {}
    pairs = list(zip(value.keys, value.values, strict=True))
    if not all(key is not None and _is_function(each) for key, each in pairs):
        return {}
    return {ast.unparse(key): (key, each) for key, each in pairs if key is not None}


def _is_function(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.Attribute | ast.Lambda) or _is_partial(value)


def _is_partial(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or last_part(value.func) != "partial" or not value.args:
        return False
    return isinstance(value.args[0], ast.Attribute | ast.Name)


def _lending_properties(tree: ast.Module, text: str) -> set[str]:
    """Properties that return what a call just took out, by names that nothing else in the file has."""
    found = {
        method.name
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, FunctionNode) and _is_lending_property(method)
    }
    return {
        name
        for name in found
        if len(re.findall(rf"\bdef {name}\b", text)) == 1
        and not re.search(rf"\b{name}\b[ \t]*(?::[^=\n]+)?=(?!=)", text)
    }


def _is_lending_property(method: FunctionNode) -> bool:
    match method.body[-1]:
        case ast.Return(value=ast.Call(func=ast.Attribute(value=ast.Attribute(), attr=name))):
            own = any(last_part(each) == "property" for each in method.decorator_list)
            return own and take_apart(name, ACQUIRE_WORDS) is not None
    return False


# A class's own fields --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Own:
    """What its methods put into its fields, each in one place."""

    cls: ast.ClassDef
    methods: dict[str, FunctionNode] = field(init=False)
    fields: dict[str, tuple[FunctionNode, ast.expr] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.methods = {node.name: node for node in self.cls.body if isinstance(node, FunctionNode)}
        self.fields = {}
        for method in self.methods.values():
            for node in statements_below(method):
                for name, value in _given_to_fields(node, _self_of(method)):
                    once = name not in self.fields and value is not None
                    self.fields[name] = (method, value) if once and value is not None else None

    def has_functions(self) -> bool:
        """Some field holds a table of functions, or a `partial`."""
        values = [found[1] for found in self.fields.values() if found is not None]
        return any(_is_partial(value) or _table(value) for value in values)

    def entries(self, name: str) -> tuple[FunctionNode, Table] | None:
        """Of the table of functions that lies in this field."""
        found = self.fields.get(name)
        if found is None:
            return None
        table = _table(found[1])
        return (found[0], table) if table else None


def _given_to_fields(node: ast.stmt, own: str) -> Iterator[tuple[str, ast.expr | None]]:
    """None where it is changed in another way."""
    match node:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=attr)], value=value) if (
            name == own
        ):
            yield attr, value
        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id=name), attr=attr), value=value) if (
            name == own
        ):
            yield attr, value
        case ast.Assign(targets=targets):
            for part in (part for target in targets for part in walk(target)):
                if isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == own:
                    yield part.attr, None
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr=attr), attr="update" | "pop"))
        ):
            yield attr, None


def _self_of(method: FunctionNode) -> str:
    return method.args.args[0].arg if method.args.args else ""


# One function ----------------------------------------------------------------------------------------------


class _Speller(ast.NodeTransformer):
    """Rewrites the calls of one function."""

    def __init__(
        self, own: _Own | None, tables: Mapping[str, Table], reads: set[str], written: list[tuple[int, str]]
    ) -> None:
        self.own, self.tables, self.reads, self.written = own, tables, reads, written
        self.self_name = ""
        self.looked_up: dict[str, ast.expr] = {}
        self.called: set[int] = set()

    def function(self, function: FunctionNode) -> None:
        self.self_name = _self_of(function) if self.own is not None else ""
        nodes = list(walk(function))
        bound = [(n.id) for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        for name, value in _assigned(list(statements_below(function))):
            if bound.count(name) == 1 and self._key(value) is not None:
                self.looked_up[name] = value
        reads = [n.attr for n in nodes if isinstance(n, ast.Attribute) and n.attr in self.reads]
        self.reads = {name for name in set(reads) if reads.count(name) == 1}  # twice it may be asked
        self.called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        if self._may_matter(nodes):
            function.body = [self.visit(each) for each in function.body]

    def _may_matter(self, nodes: list[ast.AST]) -> bool:
        return bool(self.reads) or any(
            isinstance(node, ast.Call) and self._plainly(node) is not None for node in nodes
        )

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr not in self.reads or not isinstance(node.ctx, ast.Load) or id(node) in self.called:
            return node
        return self._note(ast.Call(node, [], []), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return self._plainly(node) or node

    def _note(self, call: ast.expr, at: ast.expr) -> ast.expr:
        for part in walk(call):
            if isinstance(part, ast.Call):
                self.written.append((at.lineno, last_part(part.func)))
        return ast.copy_location(call, at)

    def _plainly(self, call: ast.Call) -> ast.expr | None:
        """The call in plain words."""
        match call.func:
            case ast.Attribute(value=ast.Name(id=root), attr=attr) if root == self.self_name and self.own:
                found = self.own.fields.get(attr)
                if found is None or attr in self.own.methods or not _is_function(found[1]):
                    return None
                return self._called(found[1], found[0], call)
            case ast.Name(id=name) if name in self.looked_up:
                return self._through_a_table(self.looked_up[name], call)
            case ast.Subscript() | ast.Call():
                return self._through_a_table(call.func, call)
        return None

    def _key(self, lookup: ast.expr) -> tuple[ast.expr, ast.expr, ast.expr | None] | None:
        """Table, key and default of `TABLE[key]` and `TABLE.get(key, default)`."""
        match lookup:
            case ast.Subscript(value=ast.Name() | ast.Attribute() as table, slice=key):
                return table, key, None
            case ast.Call(
                func=ast.Attribute(value=ast.Name() | ast.Attribute() as table, attr="get"), args=[key]
            ):
                return table, key, None
            case ast.Call(
                func=ast.Attribute(value=ast.Name() | ast.Attribute() as table, attr="get"),
                args=[key, default],
            ) if _is_function(default):
                return table, key, default
        return None

    def _through_a_table(self, lookup: ast.expr, call: ast.Call) -> ast.expr | None:
        said = self._key(lookup)
        if said is None or not isinstance(said[1], ast.Name | ast.Attribute | ast.Constant):
            return None
        where, key, default = said
        found = self._entries(where)
        if found is None:
            return None
        method, entries = found
        if (sure := entries.get(ast.unparse(key))) is not None:
            return self._called(sure[1], method, call)
        if isinstance(key, ast.Constant):
            return None
        ways = [(at, self._called(value, method, call)) for at, value in entries.values()]
        if default is not None:
            ways.append((key, self._called(default, None, call)))
        return _chosen([(at, way) for at, way in ways if way is not None], len(ways), key, call)

    def _entries(self, where: ast.expr) -> tuple[FunctionNode | None, Table] | None:
        match where:
            case ast.Name(id=name) if name in self.tables:
                return None, self.tables[name]
            case ast.Attribute(value=ast.Name(id=root), attr=attr) if root == self.self_name and self.own:
                return self.own.entries(attr)
        return None

    def _called(self, function: ast.expr, scope: FunctionNode | None, call: ast.Call) -> ast.expr | None:
        """What calling it is, where `scope` says what its names are."""
        match function:
            case ast.Lambda(args=ast.arguments(args=parameters, defaults=[]), body=body):
                if len(parameters) != len(call.args) or call.keywords:
                    return None
                given = dict(zip((each.arg for each in parameters), call.args, strict=True))
                return self._seen_here(body, scope, call, given)
            case ast.Call(args=[inner, *first], keywords=named):  # a partial
                parts = [self._seen_here(each, scope, call) for each in (inner, *first)]
                more = [(each.arg, self._seen_here(each.value, scope, call)) for each in named]
                if None in parts or any(value is None for _, value in more):
                    return None
                said, *args = [each for each in parts if each is not None]
                keywords = [ast.keyword(name, value) for name, value in more if value is not None]
                return self._note(ast.Call(said, [*args, *call.args], [*keywords, *call.keywords]), call)
        func = self._seen_here(function, scope, call)
        return self._note(ast.Call(func, call.args, call.keywords), call) if func is not None else None

    def _seen_here(
        self,
        value: ast.expr,
        scope: FunctionNode | None,
        call: ast.Call,
        given: Mapping[str, ast.expr] | None = None,
    ) -> ast.expr | None:
        """The expression in this function's words, at the place of the call; None where it speaks of what
        only the other function has."""
        local = _locals(scope) if scope is not None else {}
        named = dict(given or {})
        for part in walk(value):
            if not isinstance(part, ast.Name) or part.id in named:
                continue
            if scope is not None and part.id == _self_of(scope):
                named[part.id] = ast.Name(self.self_name, ast.Load())
            elif part.id in local:
                kept = local[part.id]
                if kept is None:
                    return None
                named[part.id] = ast.Attribute(ast.Name(self.self_name, ast.Load()), kept, ast.Load())
        here: ast.expr = _Renamed(named).visit(copy.deepcopy(value))
        for part in walk(here):
            if isinstance(part, ast.expr | ast.keyword):
                ast.copy_location(part, call)
        return self._note(here, call)


def _chosen(
    ways: list[tuple[ast.expr, ast.expr]], wanted: int, key: ast.expr, call: ast.Call
) -> ast.expr | None:
    """`a() if key == "a" else b()`; all of them are known."""
    if not ways or len(ways) != wanted:
        return None
    whole = ways[-1][1]
    for at, way in reversed(ways[:-1]):
        test = ast.copy_location(ast.Compare(key, [ast.Eq()], [at]), call)
        whole = ast.copy_location(ast.IfExp(test, way, whole), call)
    return whole


def _locals(scope: FunctionNode) -> dict[str, str | None]:
    """Its parameters and names, and in which of its object's fields it keeps them."""
    arguments = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
    found: dict[str, str | None] = {each.arg: None for each in arguments}
    for node in statements_below(scope):
        for part in walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                found.setdefault(part.id, None)
        for attr, value in _given_to_fields(node, _self_of(scope)):
            if isinstance(value, ast.Name) and value.id in found:
                found[value.id] = attr
    return found


class _Renamed(ast.NodeTransformer):
    def __init__(self, named: Mapping[str, ast.expr]) -> None:
        self.named = named

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.named[node.id]) if node.id in self.named else node
