"""Where a lease's life is written down: the statement that begins it, its block, what gives it back."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from auditor.case import Case, Parsed
from auditor.flow.lease import Lease
from auditor.model import Span

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
LOOPS = (ast.For, ast.AsyncFor, ast.While)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Life:
    """A lease bound to a plain local name: `block[index]` is the statement that acquires it."""

    file: Parsed
    lease: Lease
    function: FunctionDef
    call: ast.Call
    holder: str
    block: Sequence[ast.stmt]
    index: int

    @property
    def statement(self) -> ast.stmt:
        return self.block[self.index]

    @cached_property
    def releases(self) -> list[ast.stmt] | None:
        """The statements that give it back; None if something else than a plain statement does."""
        wanted = set(self.lease.releases)
        found = []
        for statement in statements_in(self.function.body):
            call = called_by(statement)
            if call is not None and self.file.span(call) in wanted:
                wanted.discard(self.file.span(call))
                found.append(statement)
        return None if wanted else found

    @property
    def is_told(self) -> bool:
        """Whether the holder is a parameter: `if out is None: out = pool.borrow(n)`."""
        arguments = self.function.args
        named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return any(each.arg == self.holder for each in named)

    @property
    def is_receiver(self) -> bool:
        """Whether the acquire is a call of the lease itself (`block.pin()`): the name says nothing of it."""
        return self.lease.giving_back is not None and self.lease.giving_back.itself

    @property
    def is_several(self) -> bool:
        """Whether the holder is a list of leases."""
        return self.lease.giving_back is not None and self.lease.giving_back.each

    @property
    def is_checked(self) -> bool:
        """Whether somebody asks if there is a lease at all, so that a release must ask too."""
        return any(self._asks(node) for node in ast.walk(self.function))

    def _asks(self, node: ast.AST) -> bool:
        match node:
            case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=None)]):
                return name == self.holder
            case ast.If(test=test) | ast.While(test=test) | ast.Assert(test=test) | ast.IfExp(test=test):
                return is_truth_of(test, self.holder)
        return False

    def mentions(self, node: ast.AST) -> bool:
        return mentions(node, {self.holder})

    def binds(self, node: ast.AST) -> bool:
        """Whether the holder gets another meaning somewhere in `node`."""
        return any(
            isinstance(each, ast.Name) and each.id == self.holder and not isinstance(each.ctx, ast.Load)
            for each in ast.walk(node)
        )


def is_truth_of(test: ast.expr, name: str) -> bool:
    """`x`, `not x`, and either of them within `and` and `or`."""
    match test:
        case ast.Name(id=asked):
            return asked == name
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return is_truth_of(operand, name)
        case ast.BoolOp(values=values):
            return any(is_truth_of(value, name) for value in values)
    return False


def turns_back_if_none(statement: ast.stmt, holder: str) -> bool:
    """`if x is None: return`, `assert x is not None`: after it there is a lease."""
    match statement:
        case ast.If(test=test, body=body, orelse=[]) if isinstance(body[-1], EXITS):
            return _says_none(test, holder)
        case ast.Assert(test=ast.Compare() as test):
            return _is_held_against_none(test, holder, ast.IsNot)
        case ast.Assert(test=ast.Name(id=name)):
            return name == holder
    return False


def goes_on_with(statement: ast.stmt, holder: str) -> bool:
    """The same, and `if x is None or bad: return`, which may leave with it: what goes on has a lease."""
    match statement:
        case ast.If(test=ast.BoolOp(op=ast.Or(), values=values), body=body, orelse=[]):
            return isinstance(body[-1], EXITS) and any(_says_none(value, holder) for value in values)
    return turns_back_if_none(statement, holder)


def is_only_without(statement: ast.stmt, holder: str) -> bool:
    """`if x is None:` and nothing else: what it does, it does without a lease."""
    return isinstance(statement, ast.If) and not statement.orelse and _says_none(statement.test, holder)


def _says_none(test: ast.expr, holder: str) -> bool:
    match test:
        case ast.Compare():
            return _is_held_against_none(test, holder, ast.Is)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            return name == holder
    return False


def _is_held_against_none(test: ast.Compare, holder: str, way: type[ast.cmpop]) -> bool:
    """`x is None`, and `None is x`"""
    match test:
        case (
            ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[ast.Constant(value=None)])
            | ast.Compare(left=ast.Constant(value=None), ops=[op], comparators=[ast.Name(id=name)])
        ):
            return name == holder and isinstance(op, way)
    return False


def says_held(test: ast.expr, holder: str) -> bool:
    """`x`, `x is not None`, and these within an `and`."""
    match test:
        case ast.Name(id=name):
            return name == holder
        case ast.Compare():
            return _is_held_against_none(test, holder, ast.IsNot)
        case ast.BoolOp(op=ast.And(), values=values):
            return any(says_held(value, holder) for value in values)
    return False


def names_in(node: ast.AST) -> set[str]:
    """Every name that occurs, parameters included."""
    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return used | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def new_name(wanted: str, function: ast.AST) -> str:
    """`wanted`, or with a number behind it where the function knows that name already."""
    taken = names_in(function)
    number = 1
    name = wanted
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def life_of(case: Case, *, several: bool = False) -> Life | None:
    """The life of the finding's lease, if a plain assignment binds it to a local name, or it is itself what a
    local name means; with `several` also that of the leases in a list. None where a part of that is lost."""
    file, lease = case.file, case.lease
    if file is None or lease is None or lease.giving_back is None:
        return None
    if any(leak.parted for leak in lease.leaks):
        return None
    if lease.giving_back.each and not several:
        return None
    call = call_at(file, lease.span)
    if call is None:
        return None
    statement = enclosing_statement(file, call)
    function = enclosing_function(file, call)
    holder = (
        _receiver(statement, call)
        if lease.giving_back.itself
        else _holder(statement, call, bool(lease.releases))
    )
    if function is None or holder is None or _is_shared(function, holder):
        return None
    block = block_of(file, statement)
    return Life(file, lease, function, call, holder, block, block.index(statement)) if block else None


def call_at(file: Parsed, span: Span) -> ast.Call | None:
    """The call that is written exactly there."""
    if not file.moved.isdisjoint(range(span.line, span.end_line + 1)):
        return None
    for node in file.nodes_at(span.line):
        if isinstance(node, ast.Call) and node.lineno == span.line and file.span(node) == span:
            return node
    return None


def enclosing_statement(file: Parsed, node: ast.AST) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = file.parents[node]
    return node


def enclosing_function(file: Parsed, node: ast.AST) -> FunctionDef | None:
    """The function that runs `node`; None within a lambda, a class body or at module level."""
    while node in file.parents:
        node = file.parents[node]
        if isinstance(node, SCOPES):
            return node if isinstance(node, FunctionDef) else None
    return None


def block_of(file: Parsed, statement: ast.stmt) -> Sequence[ast.stmt]:
    """The list of statements that `statement` is one of."""
    parent = file.parents[statement]
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return block
    return ()


def _holder(statement: ast.stmt, call: ast.Call, is_released: bool) -> str | None:
    """The name that the call's result is bound to; a view's, where the code itself releases by it."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return name if _is_value(value, call, is_released) else None
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return name if _is_value(value, call, is_released) else None
    return None


def _receiver(statement: ast.stmt, call: ast.Call) -> str | None:
    """The name of what the call is made of, where nobody looks at its result."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=name)) if called_by(statement) is call:
            return name
    return None


def _is_value(value: ast.expr, call: ast.Call, views: bool) -> bool:
    """Whether the value is what the call returned, or may be."""
    match value:
        case ast.Await(value=inner):
            return _is_value(inner, call, views)
        case ast.IfExp(body=body, orelse=orelse):
            return _is_value(body, call, views) or _is_value(orelse, call, views)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)) if value is not call:
            return (views or method.endswith("_")) and _is_value(inner, call, views)
    return value is call


def _is_shared(function: FunctionDef, name: str) -> bool:
    return any(
        isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names for node in ast.walk(function)
    )


def called_by(statement: ast.stmt) -> ast.Call | None:
    """The call that a statement consists of, awaited or not."""
    match statement:
        case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
            return call
    return None


def statements_in(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a body, nested ones included, those of functions and classes in it left out."""
    for statement in body:
        yield statement
        if not isinstance(statement, SCOPES):
            for block in blocks(statement):
                yield from statements_in(block)


def blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks that a compound statement consists of."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block:
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def leaves(statement: ast.stmt, block: Sequence[ast.stmt]) -> bool:
    """Whether an exit statement leaves `block`, rather than a loop within it."""
    if isinstance(statement, (ast.Return, ast.Raise)):
        return True
    if not isinstance(statement, (ast.Continue, ast.Break)):
        return False
    inside = any(
        isinstance(loop, LOOPS) and statement in set(statements_in(loop.body))
        for loop in statements_in(block)
    )
    return not inside
