"""Second names of methods, `finish_read = discard` in a class body, written as the methods that they are:

def finish_read(self, span):
    return self.discard(span)
"""

import ast
import re
from collections.abc import Iterator

_ALIAS = re.compile(r" = (?<=\w = )[a-z_]\w*\n")
"""What the text of a file with such a name has in it."""

Method = ast.FunctionDef | ast.AsyncFunctionDef


def write_aliases(tree: ast.Module, text: str) -> list[tuple[int, str]]:
    """Puts them into the tree; the lines and names of the calls that now stand in it."""
    if not _ALIAS.search(text):
        return []
    return [written for cls in _classes(tree.body) for written in _write(cls)]


def _classes(body: list[ast.stmt]) -> Iterator[ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node
            yield from _classes(node.body)


def _write(cls: ast.ClassDef) -> Iterator[tuple[int, str]]:
    methods: dict[str, Method] = {}
    for number, node in enumerate(cls.body):
        match node:
            case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
                if node.args.args:
                    methods[node.name] = node
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=name)) if name in methods:
                cls.body[number] = _forwarding(alias, methods[name], node)
                yield node.lineno, name


def _forwarding(alias: str, method: Method, at: ast.Assign) -> Method:
    own, *told = [*method.args.posonlyargs, *method.args.args]
    given: list[ast.expr] = [ast.Name(each.arg, ast.Load()) for each in told]
    if method.args.vararg is not None:
        given.append(ast.Starred(ast.Name(method.args.vararg.arg, ast.Load()), ast.Load()))
    named = [ast.keyword(each.arg, ast.Name(each.arg, ast.Load())) for each in method.args.kwonlyargs]
    if method.args.kwarg is not None:
        named.append(ast.keyword(None, ast.Name(method.args.kwarg.arg, ast.Load())))
    asked = ast.Attribute(ast.Name(own.arg, ast.Load()), method.name, ast.Load())
    value: ast.expr = ast.Call(asked, given, named)
    if isinstance(method, ast.AsyncFunctionDef):
        value = ast.Await(value)
    written = type(method)(alias, method.args, [ast.Return(value)], [], method.returns)
    ast.copy_location(written, at)
    for node in ast.walk(written.body[0]):
        ast.copy_location(node, at)
    return written
