"""One file's syntax tree with what every reader of this package asks of it: who contains whom, who calls
whom.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from auditor.model import Span, Step
from auditor.source.entries import Source
from auditor.source.imports import dotted_text, origins
from auditor.source.lifetime.sighting import Kind, Sighting
from auditor.source.nodes import LEAVES, children, every_node

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Scope = Function | ast.Lambda | ast.ClassDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Code:
    """A parsed file. Nodes of a kind come in the order of the text; of those without any below, as names,
    only the parents are known."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.parents: dict[ast.AST, ast.AST] = {}
        self._kinds: defaultdict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        waiting: list[ast.AST] = [source.tree]
        parents, kinds = self.parents, self._kinds
        while waiting:
            node = waiting.pop()
            kinds[node.__class__].append(node)
            below = children(node)
            for each in below:
                parents[each] = node
            below.reverse()
            waiting += [each for each in below if each.__class__ not in LEAVES]

    @cached_property
    def origins(self) -> dict[str, str]:
        return origins(self.source)

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """Every call, by the last part of what it calls."""
        found: defaultdict[str, list[ast.Call]] = defaultdict(list)
        for call in self._kinds[ast.Call]:
            assert isinstance(call, ast.Call)
            found[last_name(call.func)].append(call)
        return found

    @cached_property
    def functions(self) -> list[Function]:
        return [each for each in self.of(ast.FunctionDef, ast.AsyncFunctionDef) if isinstance(each, Function)]

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [each for each in self.of(ast.ClassDef) if isinstance(each, ast.ClassDef)]

    def of(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        return [node for kind in kinds for node in self._kinds[kind]]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that contain `node`, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost `def` around a node."""
        return next((each for each in self.above(node) if isinstance(each, Function)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self.above(node) if isinstance(each, ast.ClassDef)), None)

    def method_class(self, function: Function) -> ast.ClassDef | None:
        """The class whose method a function is."""
        parent = self.parents.get(function)
        return parent if isinstance(parent, ast.ClassDef) else None

    def loops_around(self, node: ast.AST) -> list[Loop]:
        """The loops of the same function whose body a node is in, innermost first."""
        found: list[Loop] = []
        below = node
        for parent in self.above(node):
            if isinstance(parent, _SCOPES):
                break
            if isinstance(parent, LOOPS) and below in parent.body:
                found.append(parent)
            below = parent
        return found

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that a node is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def symbol(self, node: ast.AST) -> str:
        """`Class.method` around a node, `` at the top of the file."""
        names = [each.name for each in self.above(node) if isinstance(each, Function | ast.ClassDef)]
        return ".".join(reversed(names))

    def sighting(
        self,
        kind: Kind,
        node: ast.expr | ast.stmt,
        what: str,
        where: str = "",
        how: str = "",
        steps: Sequence[tuple[ast.expr | ast.stmt, str]] = (),
    ) -> Sighting:
        trace = tuple(self.step(at, note) for at, note in steps)
        return Sighting(kind, self.source.span(node), self.symbol(node), what, where, how, trace)

    def step(self, node: ast.expr | ast.stmt, note: str) -> Step:
        span: Span = self.source.span(node)
        return Step(span.path, span.line, span.column, note)


def last_name(callee: ast.expr) -> str:
    """`c` of `a.b.c`, whatever `a` is."""
    if isinstance(callee, ast.Attribute):
        return callee.attr
    return callee.id if isinstance(callee, ast.Name) else ""


def place(node: ast.AST) -> tuple[int, int]:
    """Where a node starts, for comparisons."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def within(*roots: ast.AST) -> Iterator[ast.AST]:
    """The nodes of the same function in and below `roots`: other functions and classes are left out."""
    waiting = [
        child for root in roots for child in ([root] if not isinstance(root, _SCOPES) else _body(root))
    ]
    while waiting:
        node = waiting.pop()
        yield node
        if node.__class__ not in LEAVES:
            waiting += [child for child in children(node) if not isinstance(child, _SCOPES)]


def _body(scope: ast.AST) -> list[ast.AST]:
    body = scope.body if isinstance(scope, Scope) else []
    return list(body) if isinstance(body, list) else [body]


def calls_in(*roots: ast.AST) -> Iterator[ast.Call]:
    """The calls of the same function in and below `roots`."""
    return (node for node in within(*roots) if isinstance(node, ast.Call))


def names_in(*roots: ast.AST) -> set[str]:
    """Every name that is read or written in and below `roots`."""
    return {node.id for root in roots for node in every_node(root) if isinstance(node, ast.Name)}


def text_of(node: ast.AST) -> str:
    """`a.b[c]` as Python writes it."""
    return (dotted_text(node) if isinstance(node, ast.expr) else None) or ast.unparse(node)


def short(node: ast.AST, limit: int = 60) -> str:
    """The text of a node for a message."""
    text = " ".join(text_of(node).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """What a statement binds: names, fields and items, tuples taken apart."""
    match statement:
        case ast.Assign(targets=targets):
            waiting = list(targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            waiting = [target]
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.AsyncFor(target=target):
            waiting = [target]
        case ast.NamedExpr(target=target):
            waiting = [target]
        case ast.With(items=items) | ast.AsyncWith(items=items):
            waiting = [item.optional_vars for item in items if item.optional_vars]
        case _:
            return []
    found: list[ast.expr] = []
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            found.append(target.value if isinstance(target, ast.Starred) else target)
    return found


def assigned(roots: Sequence[ast.AST], text: str, *, plainly: bool = False) -> list[ast.AST]:
    """The statements below `roots` that bind what is written `text`; `plainly` leaves `+=` out."""
    return [
        node
        for node in within(*roots)
        if not (plainly and isinstance(node, ast.AugAssign))
        and any(text_of(target) == text for target in targets_of(node))
    ]
