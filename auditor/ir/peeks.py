"""What a pop takes out that a name has already: `request = queue[0]`, and `queue.popleft()` after that.

It is the same one where nothing else changed the queue in between, of the statements of one list and what is
nested in them. Who looks at the first of a queue and calls his own methods means the same one afterwards.
"""

import ast
from collections.abc import Iterator, Sequence

from auditor.ir.scope import FunctionNode
from auditor.source.nodes import children, walk

CHANGING = frozenset({"appendleft", "insert", "pop", "popleft", "remove", "clear", "rotate", "extendleft",
                      "sort", "reverse"})  # fmt: skip
LOOPS = (ast.For, ast.AsyncFor, ast.While)
NESTED = ("body", "orelse", "handlers", "finalbody", "cases")

Known = dict[str, str]
"""The name that was given the first or the last of a container."""


def looked_at_before(function: FunctionNode) -> dict[int, str]:
    """By the `id` of each such call the name of what it takes out."""
    found: dict[int, str] = {}
    if not isinstance(function, ast.Lambda):
        _go_through(function.body, {}, found)
    return found


def _go_through(statements: Sequence[ast.AST], known: Known, found: dict[int, str]) -> None:
    for statement in statements:
        own = [node for child in _expressions(statement) for node in walk(child)]
        for call in (node for node in own if isinstance(node, ast.Call)):
            _called(call, known, found)
        bound = {node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for place in [place for place, name in known.items() if name in bound]:
            del known[place]
        known |= _looked_at(statement)
        for suite in _suites(statement):
            inside = {} if isinstance(statement, LOOPS) else dict(known)
            _go_through(suite, inside, found)
            for place in known.keys() - inside.keys():
                del known[place]


def _called(call: ast.Call, known: Known, found: dict[int, str]) -> None:
    match call.func:
        case ast.Attribute(value=container, attr=way) if way in CHANGING and known:
            text = ast.unparse(container)
            end = _end(way, call.args)
            if (name := known.get(f"{text}[{end}]")) is not None:
                found[id(call)] = name
            for place in [place for place in known if place.startswith(f"{text}[")]:
                del known[place]


def _end(way: str, args: list[ast.expr]) -> str:
    """The index of what is taken out."""
    if way == "popleft":
        return "0"
    return ast.unparse(args[0]) if args else "-1"


def _looked_at(statement: ast.AST) -> Known:
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript(value=container, slice=index))
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.Subscript(value=container, slice=index))
        ):
            if ast.unparse(index) in ("0", "-1"):
                return {f"{ast.unparse(container)}[{ast.unparse(index)}]": name}
    return {}


def _expressions(statement: ast.AST) -> Iterator[ast.AST]:
    return (
        child
        for child in children(statement)
        if not isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case))
    )


def _suites(statement: ast.AST) -> Iterator[Sequence[ast.AST]]:
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield from (getattr(statement, name, ()) for name in NESTED)
