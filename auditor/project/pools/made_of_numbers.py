"""Fields that a pool's own code fills with numbers: `self.free = [Slot(i) for i in range(n)]`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Class, Function, last_part

COUNTING = frozenset({"range", "enumerate"})


def numbered_fields(cls: Class, pool: Class) -> frozenset[str]:
    """What `__init__` keeps, or a dataclass does, of what each call of the class in the pool gives it as a
    number, or as a row of them."""
    init = cls.methods.get("__init__")
    kept = list(_kept(init)) if init is not None else [(name, name) for name in _fields(cls)]
    made = [call for method in pool.methods.values() for call in _made(method, cls)]
    parameters = init.parameters[1:] if init is not None else tuple(_fields(cls))
    told = {
        name: [_argument(call, position, name) for call, _ in made]
        for position, name in enumerate(parameters)
    }
    counted = [_counted(method) for _, method in made]
    numbers = {
        name
        for name, given in told.items()
        if given and all(_is_number(each, names) for each, names in zip(given, counted, strict=True))
    }
    return frozenset(field for field, parameter in kept if parameter in numbers)


def _kept(init: Function) -> Iterator[tuple[str, str]]:
    """Fields with the parameters that they are given."""
    for target, value in assignments(init):
        if isinstance(value, ast.Name) and (field := own_attribute(target, init.owner or "")) is not None:
            yield field, value.id


def _fields(cls: Class) -> Iterator[str]:
    """Those that a dataclass declares."""
    if any("dataclass" in ast.unparse(each) for each in cls.node.decorator_list):
        for node in cls.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


def _made(method: Function, cls: Class) -> Iterator[tuple[ast.Call, Function]]:
    for node in method.nodes:
        if isinstance(node, ast.Call) and last_part(node.func) == cls.name:
            yield node, method


def _argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    if position < len(call.args):
        return call.args[position]
    return next((each.value for each in call.keywords if each.arg == name), None)


def _counted(method: Function) -> frozenset[str]:
    """`i` of `for i in range(n)` and of `for i, x in enumerate(xs)`."""
    found = set()
    for node in method.nodes:
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
            over = last_part(node.iter.func)
            first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            if over in COUNTING and isinstance(first, ast.Name):
                found.add(first.id)
    return frozenset(found)


def _is_number(value: ast.expr | None, counted: frozenset[str]) -> bool:
    match value:
        case ast.Constant(value=int() | float() | str()):
            return True
        case ast.Name(id=name):
            return name in counted
        case ast.BinOp(left=ast.List(elts=[ast.Constant(value=float())]), op=ast.Mult()):
            return True
        case ast.BinOp(left=left, right=right):
            return _is_number(left, counted) or _is_number(right, counted)
        case ast.Call(func=ast.Name(id="len")):
            return True
    return False
