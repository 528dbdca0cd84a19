"""Ways through a stdlib syntax tree that cost a fraction of what `ast.walk` does."""

import ast
import re
from collections.abc import Iterator

_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
_BLOCKS_OF: dict[type[ast.AST], tuple[str, ...]] = {
    kind: tuple(name for name in kind._fields if name in _BLOCKS)
    for base in (ast.mod, ast.stmt, ast.excepthandler, ast.match_case)
    for kind in (base, *base.__subclasses__())
}
HOLDERS = frozenset(kind for kind, blocks in _BLOCKS_OF.items() if blocks)

_FIELD = re.compile(r"(\w+)[?*]? (\w+)[,)]")  # of a node's grammar, which its docstring is: `expr* targets`
_NO_NODES = frozenset(("identifier", "string", "int", "constant"))
_WORDS = frozenset(("expr_context", "operator", "unaryop", "boolop", "cmpop"))  # `Load()`: one for all


def _below(kind: type[ast.AST]) -> tuple[str, ...]:
    grammar = (kind.__doc__ or "").partition("\n")[0]
    return tuple(name for type_, name in _FIELD.findall(grammar) if type_ not in _NO_NODES | _WORDS)


def _kinds(base: type[ast.AST]) -> Iterator[type[ast.AST]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


_BELOW = {kind: _below(kind) for kind in _kinds(ast.AST)}
LEAVES = frozenset(kind for kind, below in _BELOW.items() if not below)
"""More than half of all nodes: names, constants, `pass`."""

_GAPS = frozenset((ast.Dict, ast.arguments))  # their lists hold None for what is not there


def every_node(root: ast.AST) -> Iterator[ast.AST]:
    """`root` and all nodes below it, in no particular order."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        if node.__class__ not in LEAVES:
            waiting += children(node)


def walk(root: ast.AST) -> Iterator[ast.AST]:
    """The same, in the order of `ast.walk`: `root`, what is right below it, and so on."""
    waiting = [root]
    for node in waiting:
        if node.__class__ not in LEAVES:
            waiting += children(node)
        yield node


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below a node, in the order of its fields, but for operators and contexts."""
    if isinstance(node, ast.Attribute):  # these and calls are nearly half of the nodes that have some below
        return [node.value]
    if isinstance(node, ast.Call):
        return [node.func, *node.args, *getattr(node, "keywords", ())]
    kind = node.__class__
    found: list[ast.AST] = []
    for name in _BELOW[kind]:
        value = getattr(node, name, None)  # a node that was made by hand may lack it
        if value.__class__ is list:
            found += value
        elif value is not None:
            found.append(value)
    return [each for each in found if each is not None] if kind in _GAPS else found


def statements_in(node: ast.AST) -> list[ast.AST]:
    """The statements right below a statement, and the handlers and cases that hold more; expressions are
    passed over.
    """
    return [child for name in _BLOCKS_OF[type(node)] for child in getattr(node, name)]


def is_docstring(node: ast.AST) -> bool:
    """Or another text that stands by itself."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements right below a statement; of a lambda none."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if block.__class__ is list and block:
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def statements_below(root: ast.AST) -> Iterator[ast.stmt]:
    """All statements of a function or a block in source order, but for those of functions nested in it."""
    body = getattr(root, "body", [])
    stack = list(reversed(body)) if isinstance(body, list) else []
    while stack:
        node = stack.pop()
        if not isinstance(node, ast.stmt):
            continue
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for name in ("finalbody", "orelse", "body"):
            stack.extend(reversed(getattr(node, name, [])))
        for handler in getattr(node, "handlers", ()):
            stack.extend(reversed(handler.body))
        for case in getattr(node, "cases", ()):
            stack.extend(reversed(case.body))
