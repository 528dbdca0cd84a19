"""Ends that ask for more than the beginning did: `begin_scale()` takes a buffer `if self.world > 1:`, and
`end_scale()` gives it back `if self.world > 1 and not self.skip_step:`. On the ways between, the buffer is
there, and the next `begin_scale()` puts another one over it."""

import ast
from collections.abc import Iterator, Sequence, Set
from typing import TypeGuard

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.entered import ENTERS
from auditor.project.code.modules import Function, last_part
from auditor.project.fields.exits import PROMISING, asks_for, calls_with, ends_itself
from auditor.project.fields.of_the_exception import is_of_the_exception
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

TURNS = frozenset(
    {
        ("begin", "end"), ("begin", "finish"), ("start", "finish"), ("start", "stop"), ("start", "end"),
        ("enter", "exit"), ("enter", "leave"), ("before", "after"), ("pre", "post"), ("prepare", "finish"),
        ("prepare", "end"), ("setup", "teardown"),
    }
)  # fmt: skip
"""First words of methods that are called in turns, the second once after each call of the first."""

LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


def asks_for_more(
    method: Function,
    begun: Function,
    call: ast.Call,
    family: Sequence[Function],
    field: str,
    ending: Set[str],
) -> bool:
    """`method` ends what `call` in `begun` has put into the field, by a call of such a name, on a condition
    that `begun` has nothing to do with: it neither asks for it, nor fills anything that is asked for."""
    if (
        begun.name in ENTERS
        or not _in_turns(begun.name, method.name)
        or method.owner is None
        or begun.owner is None
    ):
        return False
    ends = [each for each in calls_with(method, field) if last_part(each.func) in ending]
    ends += [each for each in method.calls if ends_itself(each, method.owner, field)]
    if len(ends) != 1 or _in_a_loop(method, ends[0]) or _in_a_loop(begun, call):
        return False
    begins = {ast.unparse(test): said for test, said in _asked(begun, call)}
    more = [
        (test, said)
        for test, said in _asked(method, ends[0])
        if begins.get(ast.unparse(test), not said) is not said
    ]
    others = [test for test, _ in more if not asks_for(test, method.owner, field)]
    if not others or _speaks_of_it_otherwise(method, ends[0], field):
        return False
    follows = _that_follow(family, {name for test, _ in _asked(begun, call) for name in _read(test, begun)})
    return not any(_has_to_do_with_it(test, method, begun, call, {field, *follows}) for test in others)


def _in_turns(name: str, ending: str) -> bool:
    words, others = split(name), split(ending)
    return bool(words) and bool(others) and (words[0], others[0]) in TURNS and words[1:] == others[1:]


def _has_to_do_with_it(
    test: ast.expr, method: Function, begun: Function, call: ast.Call, fields: Set[str]
) -> bool:
    """It reads what `begun` speaks of, one of these fields, a promise to keep it, or the exception."""
    asked = set(_read(test, method))
    words = {word for node in walk(test) for word in split(getattr(node, "attr", getattr(node, "id", "")))}
    if not asked or PROMISING & words or is_of_the_exception(test, method):
        return True
    lenders = {id(node) for node in walk(call.func)}
    guards = {id(node) for each in begun.statements if isinstance(each, ast.If) for node in walk(each.test)}
    filled = {
        name
        for node in begun.nodes
        if id(node) not in lenders | guards and isinstance(node, ast.expr)
        if (name := own_attribute(node, begun.owner or "")) is not None
    }
    return not asked.isdisjoint({f"self.{name}" for name in filled | fields})


def _that_follow(family: Sequence[Function], asked: Set[str]) -> Iterator[str]:
    """`parallel` of `self.parallel = pp > 1`, where the beginning asks for `self.pp`."""
    names = {name.removeprefix("self.") for name in asked}
    for method in family:
        for target, value in assignments(method):
            said = {getattr(node, "attr", getattr(node, "id", "")) for node in walk(value)}
            name = own_attribute(target, method.owner or "")
            if name is not None and name not in names and said & names:
                yield name


def _speaks_of_it_otherwise(method: Function, end: ast.Call, field: str) -> bool:
    """On a way that leaves before, or on the other one: `self.kept.append(self.grad); return`."""
    own = method.owner or ""
    for node in method.statements:
        for part in (node.body, node.orelse) if isinstance(node, ast.If) else ():
            within = [inner for each in part for inner in walk(each)]
            ends = any(inner is end for inner in within)
            if not ends and any(own_attribute(each, own) == field for each in within if _reads(each)):
                return True
    return False


def _reads(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def _read(test: ast.expr, method: Function) -> Iterator[str]:
    """Fields of the object and parameters, also those that a local name was made of."""
    own = method.owner or ""
    nodes = list(walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    for target, value in assignments(method):
        if isinstance(target, ast.Name) and target.id in names:
            nodes += walk(value)
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in method.parameters[1:]:
            yield node.id
        elif isinstance(node, ast.expr) and (name := own_attribute(node, own)) is not None:
            yield f"self.{name}"


def _in_a_loop(method: Function, call: ast.AST) -> bool:
    return any(isinstance(node, LOOPS) and any(i is call for i in walk(node)) for node in method.statements)


def _asked(method: Function, call: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """What has to be so, or not so, for the method to get there."""
    body = method.node.body if isinstance(method.node.body, list) else []
    yield from _up_to(body, call)


def _up_to(suite: Sequence[ast.stmt], call: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    for statement in suite:
        inside = any(inner is call for inner in walk(statement))
        if isinstance(statement, ast.If):
            if not inside and isinstance(statement.body[-1], LEAVING):
                yield from _parts(statement.test, False)
            for part, said in ((statement.body, True), (statement.orelse, False)):
                if any(inner is call for each in part for inner in walk(each)):
                    yield from _parts(statement.test, said)
                    yield from _up_to(part, call)
        elif inside:
            for part in _suites(statement):
                if any(inner is call for each in part for inner in walk(each)):
                    yield from _up_to(part, call)
        if inside:
            return


def _suites(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for handler in getattr(statement, "handlers", ()):
        yield handler.body


def _parts(test: ast.expr, said: bool) -> Iterator[tuple[ast.expr, bool]]:
    """`a` and `b`, both, of `a and b` that is so, or of `not a or not b` that is not."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield from _parts(inner, not said)
        case ast.BoolOp(op=ast.And(), values=values) if said:
            for each in values:
                yield from _parts(each, True)
        case ast.BoolOp(op=ast.Or(), values=values) if not said:
            for each in values:
                yield from _parts(each, False)
        case _:
            yield test, said
