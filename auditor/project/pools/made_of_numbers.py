"""Fields that a pool's own code fills with numbers: `self.free = [Slot(i) for i in range(n)]`."""

import ast
from collections.abc import Iterator

from auditor.ir.calls import PUTTING
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Class, Function, last_part
from auditor.source.nodes import walk

COUNTING = frozenset({"range", "enumerate"})

LOOKING_UP = frozenset({"pop", "get", "discard", "add", "remove", "setdefault"})
"""Methods of a table, or of a set, that are told a key."""


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


def known_by(pool: Class, field: str) -> bool:
    """Whether the pool's code leads from the number back to the object: a list of such numbers, a table that
    is looked into under a number of somebody else's. In `self.busy[buf.bid]`, and no other way, nobody is
    found but who has the buffer; in `self.spare[line.to].append(line)` lie those that nobody has."""
    parents = {id(child): node for node in walk(pool.node) for child in ast.iter_child_nodes(node)}
    tables = set()
    for node in walk(pool.node):
        if not (isinstance(node, ast.Attribute) and node.attr == field) or isinstance(node.ctx, ast.Store):
            continue
        if _is_laid_on_a_pile(node, parents) or _is_cut(node, parents):
            continue
        table = _key_of(node, parents)
        if table is not None:
            tables.add(table)
        elif isinstance(parents.get(id(node)), ast.Call | ast.Tuple | ast.List | ast.Subscript):
            return True
    return any(_looked_into_by_others(pool, table, field, parents) for table in tables)


def _is_cut(node: ast.expr, parents: dict[int, ast.AST]) -> bool:
    """`wider.data[:n] = buffer.data[:n]` moves what is in the one to the other."""
    parent = parents.get(id(node))
    if (
        not isinstance(parent, ast.Subscript)
        or parent.value is not node
        or not isinstance(parent.slice, ast.Slice)
    ):
        return False
    whole = parents.get(id(parent))
    return isinstance(whole, ast.Assign) and all(
        isinstance(each, ast.Subscript) for each in (whole.value, *whole.targets)
    )


def _key_of(node: ast.expr, parents: dict[int, ast.AST]) -> str | None:
    """`busy` of `self.busy[node]`, `self.busy.pop(node)`, `node in self.busy`."""
    parent = parents.get(id(node))
    match parent:
        case ast.Subscript(value=ast.Attribute(value=ast.Name(), attr=table), slice=key) if key is node:
            return table
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name(), attr=table), attr=asked),
            args=[key, *_],
        ) if key is node and asked in LOOKING_UP:
            return table
        case ast.Compare(
            left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute(value=ast.Name(), attr=table)]
        ) if key is node:
            return table
    return None


def _is_laid_on_a_pile(node: ast.Attribute, parents: dict[int, ast.AST]) -> bool:
    """`self.spare[line.to].append(line)`"""
    way = parents.get(id(parents.get(id(node))))
    match way, parents.get(id(way)):
        case ast.Attribute(attr=put), ast.Call(args=[thing]) if put in PUTTING:
            return ast.unparse(thing) == ast.unparse(node.value)
    return False


def _looked_into_by_others(pool: Class, table: str, field: str, parents: dict[int, ast.AST]) -> bool:
    keys = [key for node in walk(pool.node) if (key := _key_into(node, table)) is not None]
    own = pool.text.count(f".{table}")
    elsewhere = pool.module.text.count(f".{table}") > own
    return elsewhere or not all(isinstance(key, ast.Attribute) and key.attr == field for key in keys)


def _key_into(node: ast.AST, table: str) -> ast.expr | None:
    match node:
        case ast.Subscript(value=ast.Attribute(attr=name), slice=key) if name == table:
            return key
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name), attr=asked), args=[key, *_]) if (
            name == table and asked in LOOKING_UP
        ):
            return key
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute(attr=name)]) if (
            name == table
        ):
            return key
    return None
