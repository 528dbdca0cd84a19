"""Who goes over a generator, and whether to its end.

    for page in pages(pool):             # to the end
        count += len(page)
    return next(pages(pool), None)       # not: it is closed at its first `yield`

Another generator that hands on what it gets, `yield from enumerate(pages(pool))`, is gone over in its
place."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.project.code.bindings import assignments
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, last_part
from auditor.source.nodes import walk

ALONGSIDE = frozenset({"enumerate", "zip", "tqdm", "closing", "aclosing"})
"""Calls that go over what they are given, and stop where their own consumer stops."""

SOME = frozenset({"islice", "takewhile"})
"""Calls that leave what they are given at its `yield`."""

FIRST = frozenset({"any", "all", "next", "anext"})
WHOLE = frozenset(
    {"list", "tuple", "set", "frozenset", "dict", "sorted", "sum", "max", "min", "deque", "join"}
)

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LOOPS = ast.For | ast.AsyncFor | ast.While
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp


@dataclass(frozen=True, slots=True)
class Consumer:
    """`call` asks the generator, `at` goes over it; `each` is what a loop calls the things that come out."""

    function: Function
    call: ast.Call
    at: ast.AST
    stops: bool
    each: ast.expr | None = None


@dataclass(frozen=True, slots=True)
class _Use:
    """What is gone over, where; `on` where others go over what comes of it."""

    at: ast.AST
    source: ast.expr
    stops: bool = False
    on: bool = False
    each: ast.expr | None = None


def consumers(generator: Function, calls: Calls, through: tuple[Function, ...] = ()) -> Iterator[Consumer]:
    for function in calling(generator, calls):
        for use in _uses(function):
            for call, some in _gone_over(use.source, function):
                own = any(call is each for each in function.calls)  # else it is a nested function's
                if not (own and asks(call, function, generator, calls)):
                    continue
                if use.stops or some or not use.on:
                    yield Consumer(function, call, use.at, use.stops or some, use.each)
                elif function is not generator and function not in through:
                    yield from consumers(function, calls, (*through, generator))


def calling(generator: Function, calls: Calls) -> Iterator[Function]:
    for module in calls.model.project.parsed():
        if f"{generator.name}(" in module.text:
            yield from (each for each in list(module.by_node.values()) if f"{generator.name}(" in each.text)


def asks(call: ast.Call, function: Function, generator: Function, calls: Calls) -> bool:
    """For sure, or by the one name that there is."""
    if last_part(call.func) != generator.name:
        return False
    known = calls.model.callee(function, call.func)
    return known is generator if known is not None else calls.targets(function, call)[0] == (generator,)


def _uses(function: Function) -> Iterator[_Use]:
    for node in function.own_nodes:
        match node:
            case (
                ast.For(target=each, iter=source, body=body)
                | ast.AsyncFor(target=each, iter=source, body=body)
            ):
                on = any(isinstance(inner, ast.Yield) for part in body for inner in walk(part))
                yield _Use(node, source, _stops(body), on, each)
            case ast.YieldFrom(value=source) | ast.Return(value=ast.expr() as source):
                yield _Use(node, source, on=True)
            case ast.ListComp() | ast.SetComp() | ast.DictComp():
                yield _Use(node, node.generators[0].iter, each=node.generators[0].target)
            case ast.Call(args=[given, *_]) if (name := last_part(node.func)) in FIRST | WHOLE:
                if isinstance(given, ast.GeneratorExp):
                    first = given.generators[0]
                    yield _Use(node, first.iter, name in FIRST, each=first.target)
                else:
                    yield _Use(node, given, name in FIRST)


def _gone_over(source: ast.expr, function: Function, some: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """`stage(outputs)` itself, in `enumerate(stage(outputs))`, and what a name stands for; and whether that
    leaves it early."""
    if isinstance(source, ast.Name):
        source = _called(source, function) or source
    if not isinstance(source, ast.Call):
        return
    name = last_part(source.func)
    if name in ALONGSIDE or name in SOME:
        for given in source.args:
            yield from _gone_over(given, function, some or name in SOME)
    else:
        yield source, some


def _called(name: ast.Name, function: Function) -> ast.expr | None:
    """`stage(outputs)` of `stream = stage(outputs)` and `with closing(stage(outputs)) as stream:`, if nothing
    but this goes over it."""
    bound = [
        value
        for target, value in assignments(function)
        if isinstance(target, ast.Name) and target.id == name.id
    ]
    bound += [
        item.context_expr
        for node in function.statements
        if isinstance(node, ast.With | ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name) and item.optional_vars.id == name.id
    ]
    reads = [
        node for node in function.of_kind(ast.Name) if node.id == name.id and isinstance(node.ctx, ast.Load)
    ]
    closed = {id(node.value) for node in function.of_kind(ast.Attribute) if node.attr in ("close", "aclose")}
    return bound[0] if len(bound) == 1 and [r for r in reads if id(r) not in closed] == [name] else None


def _stops(body: list[ast.stmt], ways: tuple[type[ast.stmt], ...] = (ast.Break, ast.Return)) -> bool:
    """The loop is left by `break`, or by `return`, before the generator has come to its end."""
    for statement in body:
        if isinstance(statement, ways):
            return True
        if isinstance(statement, FUNCTIONS):
            continue
        inner = (ast.Return,) if isinstance(statement, LOOPS) else ways  # a `break` there leaves that one
        blocks = [getattr(statement, "body", []), getattr(statement, "orelse", [])]
        blocks += [getattr(statement, "finalbody", [])]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        blocks += [each.body for each in getattr(statement, "cases", [])]
        if any(_stops(block, inner) for block in blocks):
            return True
    return False
