"""What a pool's releasing function does with a second release, and with what is not its own: read off its
body."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

DEPTH = 3


@dataclass(frozen=True, slots=True)
class Body:
    """`tolerant`: a second release does nothing, or only takes back one of several holds. `checked`: what was
    never handed out is noticed."""

    tolerant: bool
    checked: bool


class ReleaseBodies:
    """Each releasing function is read once."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._read: dict[Function, Body] = {}

    def of(self, function: Function, depth: int = 0) -> Body:
        if function not in self._read:
            self._read[function] = Body(True, False)  # a release that calls itself says nothing
            self._read[function] = self._judge(function, depth)
        return self._read[function]

    def _judge(self, function: Function, depth: int) -> Body:
        if isinstance(function.node, (ast.Module, ast.Lambda)):
            return Body(True, False)
        if function.is_abstract:
            return Body(False, True)
        own = Body(_tolerates(function.node), _looks_up(function.node))
        inner = [self.of(target, depth + 1) for target in self._passed_on(function)] if depth < DEPTH else []
        return Body(
            own.tolerant or any(b.tolerant for b in inner), own.checked or any(b.checked for b in inner)
        )

    def _passed_on(self, function: Function) -> Iterator[Function]:
        """Functions that are given one of its parameters."""
        given = set(function.parameters)
        for call in function.calls:
            if any(isinstance(arg, ast.Name) and arg.id in given for arg in call.args):
                yield from self.calls.targets(function, call)[0][:2]


def _tolerates(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    raises = any(isinstance(each, (ast.Raise, ast.Assert)) for each in walk(node))
    for each in walk(node):
        match each:
            case ast.Call(func=ast.Attribute(attr="discard")):
                return True
            case ast.Call(func=ast.Attribute(attr="pop" | "get"), args=[_, _]) if not raises:
                return True
            case ast.AugAssign(op=ast.Sub(), target=ast.Attribute() | ast.Subscript()) if _counts(
                each.target
            ):
                return True
            case ast.If() if _asks_whether_held(each):
                return True
            case ast.ExceptHandler(type=ast.Name(id="KeyError" | "ValueError"), body=body) if not any(
                isinstance(inner, ast.Raise) for statement in body for inner in walk(statement)
            ):
                return True
    return False


def only_sets_fields(function: Function) -> bool:
    """`out.data = empty`: doing so twice is doing it once."""
    if isinstance(function.node, (ast.Module, ast.Lambda)):
        return False
    given = set(function.parameters)
    sets = False
    for each in function.nodes:
        match each:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))]) if name in given:
                sets = True
            case ast.AugAssign() | ast.Delete():
                return False
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if name in given:
                if attr not in ("values", "items", "keys"):
                    return False
    return sets


def _counts(target: ast.expr) -> bool:
    """`block.ref_cnt -= 1`: several may hold it."""
    text = ast.unparse(target).lower()
    return "ref" in text or "count" in text or "pin" in text or "user" in text


def _asks_whether_held(node: ast.If) -> bool:
    """A test of membership or of the object's own state that does not end in a complaint."""
    complains = any(isinstance(inner, ast.Raise) for statement in node.body for inner in walk(statement))
    if complains:
        return False
    for test in walk(node.test):
        match test:
            case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                return True
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], left=ast.Name() | ast.Attribute()):
                return isinstance(test.left, ast.Attribute) or not _returns_at_once(node)
            case ast.Attribute(attr=attr) if any(
                word in attr.lower()
                for word in ("free", "released", "ref", "count", "closed", "valid", "alloc", "in_use", "live")
            ):
                return True
    return False


def _returns_at_once(node: ast.If) -> bool:
    return isinstance(node.body[0], (ast.Return, ast.Continue))


def _looks_up(node: ast.AST) -> bool:
    """Raises, or takes out of a table what must be there."""
    for each in walk(node):
        match each:
            case ast.Raise() | ast.Assert() | ast.Delete():
                return True
            case ast.Call(func=ast.Attribute(attr="remove" | "index" | "pop"), args=[_]):
                return True
    return False
