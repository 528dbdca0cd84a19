"""Fields of dataclasses that take something out when an object is made:

    @dataclass
    class Parcel:
        weight: float
        printer: str = field(default_factory=PRINTERS.claim)

Such a class is given the `__init__` that the decorator would make, so that it is read like any other."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.modules import last_part
from auditor.protocols.vocabulary import ACQUIRE_WORDS, take_apart

FACTORY = re.compile(r"default_factory=(?:\w+\.)+(\w+)")


def names_of_factories(text: str) -> list[str]:
    return FACTORY.findall(text) if "default_factory=" in text else []


def write_constructors(tree: ast.Module, text: str) -> list[tuple[int, str]]:
    """Adds them to the tree; the lines and last names of the calls that now stand in it."""
    written: list[tuple[int, str]] = []
    if not any(take_apart(name, ACQUIRE_WORDS) for name in names_of_factories(text)):
        return written
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef) and "dataclass" in map(_decorator, cls.decorator_list):
            fields = list(_fields(cls))
            taking = [value for _, value in fields if (made := _factory(value)) and _takes(made)]
            own = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
            if taking and own.isdisjoint({"__init__", "__post_init__"}):
                cls.body.append(_constructor(cls, fields))
                written += [(each.lineno, last_part(_factory(each) or each)) for each in taking if each]
    return written


def _decorator(node: ast.expr) -> str:
    return last_part(node.func if isinstance(node, ast.Call) else node)


def _fields(cls: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for node in cls.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if "ClassVar" not in ast.unparse(
                node.annotation
            ):
                yield name, value


def _factory(value: ast.expr | None) -> ast.expr | None:
    """`PRINTERS.claim` of `field(default_factory=PRINTERS.claim)`"""
    if isinstance(value, ast.Call) and last_part(value.func) == "field":
        return next((each.value for each in value.keywords if each.arg == "default_factory"), None)
    return None


def _takes(factory: ast.expr) -> bool:
    return isinstance(factory, ast.Attribute) and take_apart(factory.attr, ACQUIRE_WORDS) is not None


def _constructor(cls: ast.ClassDef, fields: list[tuple[str, ast.expr | None]]) -> ast.FunctionDef:
    """`def __init__(self, weight, printer=None):`, which stands where the fields do."""
    types = {
        ast.unparse(node.target): node.annotation for node in cls.body if isinstance(node, ast.AnnAssign)
    }
    given = [ast.arg(name, types[name]) for name, _ in fields]
    defaults = [_default(value) for _, value in fields if value is not None]
    body = [_set(name, value, cls) for name, value in fields]
    told = ast.arguments([], [ast.arg("self"), *given], None, [], [], None, defaults[-len(given) :])
    made = ast.FunctionDef("__init__", told, body, [], None, None)
    lines = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    ast.copy_location(made, lines[0])
    made.end_lineno, made.end_col_offset = lines[-1].end_lineno, lines[-1].end_col_offset
    return ast.fix_missing_locations(made)


def _default(value: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Constant(None), value) if isinstance(value, ast.Call) else value


def _set(name: str, value: ast.expr | None, cls: ast.ClassDef) -> ast.stmt:
    told: ast.expr = ast.Name(name, ast.Load())
    if (factory := _factory(value)) is not None and value is not None:
        made = ast.copy_location(ast.Call(factory, [], []), value)
        absent = ast.Compare(ast.Name(name, ast.Load()), [ast.Is()], [ast.Constant(None)])
        told = ast.IfExp(absent, made, told)
    target = ast.Attribute(ast.Name("self", ast.Load()), name, ast.Store())
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([target], told), value or cls))
