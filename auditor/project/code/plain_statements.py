"""Statements that say in other words what most code says plainly, written so before anything else reads them.

    self.free: list[int] = []            # self.free: list[int], and self.free = []
    if (page := self.take()) is None:    # page = self.take(), and if page is None:
    if None is page:                     # if page is None:
    waiting = self.waiting               # self.waiting.popleft(), where waiting.popleft() stands
    act.owner, act.uses = rank, 1        # act.owner = rank, and act.uses = 1

Types are read where they stand, so an annotation stays; what it annotates is then a plain assignment to all
who look for one. A local name is another word for the field only as long as nobody puts something else there:
a function that sets the field, or calls an own method that does, keeps its name."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from auditor.source.nodes import HOLDERS, blocks_of, every_node, statements_below, statements_in, walk

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

ANNOTATED = re.compile(r"^[ \t]+(?:\w+\.)?\w+[ \t]*:[^=\n]+=[^=]", re.MULTILINE)
TOGETHER = re.compile(r"^[ \t]+\w+\.\w+, \w+\.\w+[^=\n]* = \w+, ", re.MULTILINE)
NOTHING_FIRST = re.compile(r"\bNone (?:is|==|!=) ")
OF_OWN = re.compile(r"^[ \t]+(\w+) = self\.\w+[ \t]*(?:#.*)?$", re.MULTILINE)

FLIPPED = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)
CONTAINERS_OWN = frozenset({"pop", "popleft", "popitem", "append", "appendleft", "clear", "remove", "discard",
                            "add", "extend", "setdefault", "get", "values", "items", "keys"})  # fmt: skip
"""Methods of lists, tables and queues: a local name of one of those is not a name for what is lent."""


def write_plainly(tree: ast.Module, text: str) -> None:
    """Rewrites the tree."""
    if NOTHING_FIRST.search(text):
        _put_first_what_is_asked(tree)
    aliases = OF_OWN.search(text) is not None
    others = ":=" in text or ANNOTATED.search(text) or TOGETHER.search(text)
    functions = list(_functions(tree)) if aliases or others else []
    for function in functions if others else ():
        for block in _blocks_of(function):
            block[:] = [plain for statement in block for plain in _plain(statement)]
    if aliases:
        sets = _FieldsSet(functions)
        for function in functions:
            _without_local_names(function, sets)


def _functions(tree: ast.Module) -> Iterator[FunctionNode]:
    """All of them, those within others as well: they are statements, and no expression is looked into."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in statements_in(waiting.pop()):
            if isinstance(node, FunctionNode):
                yield node
            if type(node) in HOLDERS:
                waiting.append(node)


def _put_first_what_is_asked(tree: ast.Module) -> None:
    for node in every_node(tree):
        match node:
            case ast.Compare(left=ast.Constant(value=None) as nothing, ops=[op], comparators=[asked]) if (
                isinstance(op, FLIPPED)
            ):
                node.left, node.comparators = asked, [nothing]


def _blocks_of(function: FunctionNode) -> Iterator[list[ast.stmt]]:
    """The function's own, and those of its statements; functions within it are asked for themselves."""
    yield function.body
    for statement in list(statements_below(function)):
        if not isinstance(statement, (FunctionNode, ast.ClassDef)):
            yield from blocks_of(statement)


def _plain(statement: ast.stmt) -> Iterator[ast.stmt]:
    match statement:
        case ast.AnnAssign(target=ast.Attribute() as target, value=ast.expr() as value):
            shown = ast.copy_location(ast.Attribute(target.value, target.attr, ast.Store()), target)
            yield ast.copy_location(ast.Assign([shown], value), statement)
            statement.value = None
            yield statement
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if (
            _one_after_the_other(targets, values)
        ):
            for each, given in zip(targets, values, strict=True):
                yield ast.copy_location(ast.Assign([each], given), statement)
        case ast.If(test=test) if (named := _named_first(test)) is not None:
            yield ast.copy_location(ast.Assign([named.target], named.value), named)
            read = ast.copy_location(ast.Name(named.target.id, ast.Load()), named.target)
            statement.test = _put_for(test, named, read)
            yield statement
        case _:
            yield statement


def _one_after_the_other(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """Whether constants are given to several fields, so that the order tells nothing."""
    plain = all(isinstance(each, ast.Attribute) for each in targets) and len(targets) == len(values)
    return plain and all(isinstance(each, ast.Constant | ast.Name) for each in values)


def _named_first(test: ast.expr) -> ast.NamedExpr | None:
    """What the condition gives a name before it asks anything."""
    match test:
        case ast.NamedExpr():
            return test
        case ast.UnaryOp(operand=first) | ast.Compare(left=first) | ast.BoolOp(values=[first, *_]):
            return _named_first(first)
    return None


def _put_for(test: ast.expr, named: ast.NamedExpr, read: ast.Name) -> ast.expr:
    if test is named:
        return read
    match test:
        case ast.UnaryOp(operand=first):
            test.operand = _put_for(first, named, read)
        case ast.Compare(left=first):
            test.left = _put_for(first, named, read)
        case ast.BoolOp(values=[first, *_]):
            test.values[0] = _put_for(first, named, read)
    return test


# Local names of a field -------------------------------------------------------------------------------------


class _FieldsSet:
    """The fields to which the functions of a name give a new value; few are ever asked for."""

    def __init__(self, functions: Iterable[FunctionNode]) -> None:
        self._functions: dict[str, list[FunctionNode]] = {}
        for function in functions:
            self._functions.setdefault(function.name, []).append(function)
        self._known: dict[str, frozenset[str]] = {}

    def by(self, name: str) -> frozenset[str]:
        if name not in self._known:
            nodes = chain.from_iterable(map(every_node, self._functions.get(name, ())))
            self._known[name] = frozenset(
                node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_written(node)
            )
        return self._known[name]


def _without_local_names(function: FunctionNode, sets: _FieldsSet) -> None:
    """`sets`: the fields that each function gives a new value, so that the name is of the old one."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    own = arguments[0].arg if arguments else ""
    if own != "self" or not any(map(_names_own_field, statements_below(function))):
        return
    nodes = list(every_node(function))
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and _is_written(node))
    bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
    renewed = frozenset().union(*(sets.by(name) for name in (function.name, *_own_calls(nodes))))
    found: dict[str, ast.Attribute] = {}
    for block in _blocks_of(function):
        for at, statement in enumerate(block):
            match statement:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Attribute(value=ast.Name(id="self"), attr=attr) as value,
                ) if bound[name] == 1 and attr not in renewed and _is_container(function, name):
                    found[name] = value
                    block[at] = ast.copy_location(ast.Pass(), statement)
    if found:
        _Spelled(found).visit(function)


def _names_own_field(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.Attribute(value=ast.Name(id="self"))):
            return True
    return False


def _own_calls(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=method)):
                yield method


def _is_written(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_container(function: FunctionNode, name: str) -> bool:
    """Whether it is asked for nothing but what containers do, and looked into."""
    asked, known = 0, 0
    for node in walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=each), attr=method) if each == name:
                asked += method in CONTAINERS_OWN
                known += method in CONTAINERS_OWN
            case ast.Subscript(value=ast.Name(id=each)) if each == name:
                known += 1
            case ast.For(iter=ast.Name(id=each)) if each == name:
                known += 1
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=each)]) if each == name:
                known += 1
            case ast.While(test=ast.Name(id=each)) | ast.If(test=ast.Name(id=each)) if each == name:
                known += 1
            case ast.UnaryOp(operand=ast.Name(id=each)) if each == name:
                known += 1
            case ast.Compare(comparators=[ast.Name(id=each)], ops=[ast.In() | ast.NotIn()]) if each == name:
                known += 1
    read = sum(isinstance(node, ast.Name) and node.id == name for node in walk(function)) - 1
    return asked > 0 and known == read


class _Spelled(ast.NodeTransformer):
    def __init__(self, fields: dict[str, ast.Attribute]) -> None:
        self.fields = fields

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.fields.get(node.id)
        if value is None:
            return node
        own = ast.copy_location(ast.Name("self", ast.Load()), node)
        return ast.copy_location(ast.Attribute(own, value.attr, node.ctx), node)
