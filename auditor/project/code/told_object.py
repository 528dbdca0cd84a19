"""Functions that are told the same object first, seen as methods of its class:

def draw(ring: Ring):            class Ring:
    return ring.free.pop()           def draw(ring):
                                         return ring.free.pop()
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.shared_state import OBJECT, Shared, empty_class, name_of, parsed

PLAIN = frozenset({"str", "int", "float", "bool", "bytes"})
"""Of these no two functions work on the same one."""


def told_the_same(module: Module, plain: Sequence[Function]) -> Iterator[tuple[str, list[Function]]]:
    """Functions that are told the same object first, by the class that it is said to be of; or else by its
    name, if that is one of a thing."""
    told: dict[tuple[str, str], list[Function]] = {}
    for function in plain:
        if function.parameters and (said := _said_of_first(function)) not in PLAIN:
            key = (said, "") if said in module.classes else (said, function.parameters[0])
            told.setdefault(key, []).append(function)
    for (said, _), functions in sorted(told.items()):
        if len(functions) > 1:
            yield said, functions


def _said_of_first(function: Function) -> str:
    assert isinstance(function.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    arguments = (*function.node.args.posonlyargs, *function.node.args.args)
    said = arguments[0].annotation
    return ast.unparse(said).strip("'\"") if said is not None else ""


def methods_of_object(module: Module, said: str, functions: Sequence[Function]) -> Shared:
    """Beside those of the class itself, which say how it begins."""
    known = module.classes.get(said)
    name = said if said.isidentifier() and said[:1].isupper() else name_of(module)
    cls = Class(module, known.qualname, known.node) if known is not None else empty_class(module, name)
    for name, method in known.methods.items() if known is not None else ():
        cls.methods[name] = replace(method, cls=cls, field_work=None)
    seen: dict[Function, Function] = {}
    for function in functions:
        method = _with_keys_as_fields(function, cls) or replace(
            function, cls=cls, field_work=None, is_plain=True
        )
        cls.methods.setdefault(function.name, method)
        seen[function] = method
    cls._text = "\n".join([known.text if known is not None else "", *map(_with_fields_of_object, functions)])
    return Shared(cls, seen)


def _with_keys_as_fields(function: Function, cls: Class) -> Function | None:
    """Where it is told a dict, `ring["free"]`: written as `ring.free`."""
    told = function.parameters[0]
    if re.search(rf"""\b{re.escape(told)}\[["']""", function.text) is None:
        return None
    copied = parsed(function.module, function.node) if isinstance(function.node, ast.stmt) else []
    if not copied or not isinstance(copied[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    node = ast.fix_missing_locations(_KeysAsFields(told).visit(copied[0]))
    return Function(function.module, function.qualname, node, cls, is_plain=True)


class _KeysAsFields(ast.NodeTransformer):
    def __init__(self, told: str) -> None:
        self.told = told

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))) if (
                name == self.told and key.isidentifier()
            ):
                return ast.copy_location(ast.Attribute(node.value, key, node.ctx), node)
        return node


def _with_fields_of_object(function: Function) -> str:
    """Its text with `ring.free`, and `ring["free"]`, as `self.free`."""
    told = re.escape(function.parameters[0])
    text = re.sub(rf"""\b{told}\[["'](\w+)["']\]""", rf"{OBJECT}.\1", function.text)
    return re.sub(rf"\b{told}\.", f"{OBJECT}.", text)
