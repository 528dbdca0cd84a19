"""Memory of `torch.empty` or `np.empty` that is read before anybody wrote it (PA206).

Read from the syntax alone: the first thing that happens to the name, in the order of execution, is a read.
A write under a condition counts as one, and so does whatever may write: an unknown call, a view."""

import ast
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto

from auditor.protocols.tensor_accesses import Access, access_of
from auditor.source.imports import dotted_text
from auditor.source.lifetime.code import Code, Function, last_name, place
from auditor.source.lifetime.sighting import Kind, Sighting
from auditor.source.lifetime.unwritten_makers import (
    MADE_BY_SIZE,
    WITH_HOLES,
    is_chosen_from,
    is_sized,
    leaves_holes,
)
from auditor.source.nodes import every_node

MAKERS = ("empty", "empty_like", "new_empty", *MADE_BY_SIZE, *WITH_HOLES)
MODULES = frozenset({"torch", "numpy", "cupy", "jax", "np", "cp"})
METADATA = frozenset(
    {"shape", "dtype", "device", "ndim", "size", "nbytes", "itemsize", "strides", "layout", "flags"}
)
SAME_VALUES = frozenset({"T", "mT", "H", "real", "imag", "data"})
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult, ast.Pow, ast.FloorDiv)
COMPILED = frozenset({"ops", "_C", "library", "ctypeslib"})
"""Where functions that write what they are given may have any name."""
DEPTH = 3


class Seen(Enum):
    """What a piece of code does to the name first."""

    NOTHING = auto()
    READ = auto()
    OTHER = auto()  # written, given away, or something that cannot be told


First = tuple[Seen, ast.expr | ast.stmt | None]
NOTHING: First = (Seen.NOTHING, None)
OTHER: First = (Seen.OTHER, None)


def memory_unwritten(code: Code) -> Iterator[Sighting]:
    """Each read that comes first, and arithmetic on the spot: `torch.empty(n) - inf`."""
    for call in sorted((c for name in MAKERS for c in code.calls.get(name, ())), key=place):
        function = code.function_of(call)
        if function is None or _is_for_shapes(function) or not _makes(code, call):
            continue
        parent = code.parents[call]
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ARITHMETIC):
            yield code.sighting(Kind.UNWRITTEN, parent, "the result", last_name(call.func))
            continue
        name = _bound(parent, call)
        if name is None:
            continue
        if last_name(call.func) in WITH_HOLES and is_chosen_from(code, parent, name):
            continue
        seen, at = _first(code, _following(code, parent), name, DEPTH)
        if seen is Seen.READ and at is not None:
            steps = ((call, "made here, uncleared"), (at, "read here, before anything was written"))
            yield code.sighting(Kind.UNWRITTEN, at, f"`{name}`", last_name(call.func), steps=steps)


def _is_for_shapes(function: Function) -> bool:
    """`@register_meta`, `@register_fake`: run on tensors without memory."""
    names = (last_name(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list)
    return any(word in name for name in names for word in ("meta", "fake", "abstract"))


def _makes(code: Code, call: ast.Call) -> bool:
    """Whether the memory has elements and is real."""
    if last_name(call.func) == "new_empty":
        return isinstance(call.func, ast.Attribute) and not _has_no_elements(call)
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return False
    module = code.origins.get(call.func.value.id, "").partition(".")[0]
    if module not in MODULES:
        return False
    if last_name(call.func) in MADE_BY_SIZE:
        return module == "torch" and is_sized(call)
    if last_name(call.func) in WITH_HOLES:
        return module != "torch" and leaves_holes(call)
    if any(
        k.arg == "device" and isinstance(k.value, ast.Constant) and k.value.value == "meta"
        for k in call.keywords
    ):
        return False
    return not _has_no_elements(call)


def _has_no_elements(call: ast.Call) -> bool:
    """A size is nought; `x.shape[0]` is none."""
    sizes = [*call.args, *(k.value for k in call.keywords if k.arg in ("size", "shape"))]
    lengths = [
        e for size in sizes for e in (size.elts if isinstance(size, (ast.Tuple, ast.List)) else [size])
    ]
    return any(isinstance(length, ast.Constant) and length.value == 0 for length in lengths)


def _bound(parent: ast.AST, call: ast.Call) -> str | None:
    """The local that the call's result becomes."""
    match parent:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if value is call:
            return name
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is call:
            return name
    return None


def _following(code: Code, statement: ast.AST) -> list[ast.stmt]:
    """The statements of the same block that come after one."""
    for _, block in ast.iter_fields(code.parents[statement]):
        if isinstance(block, list) and statement in block:
            return list(block[block.index(statement) + 1 :])
    return []


def _first(code: Code, block: Sequence[ast.stmt], name: str, depth: int) -> First:
    for statement in block:
        seen = _statement(code, statement, name, depth)
        if seen[0] is not Seen.NOTHING:
            return seen
    return NOTHING


def _statement(code: Code, statement: ast.stmt, name: str, depth: int) -> First:
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            return _then(
                _mentions(code, [test], name, depth), lambda: _branches(code, [body, orelse], name, depth)
            )
        case ast.While(test=test, body=body):
            return _then(
                _mentions(code, [test], name, depth), lambda: _turn(code, statement, body, name, depth)
            )
        case ast.For(target=target, iter=over, body=body) | ast.AsyncFor(target=target, iter=over, body=body):
            return _then(
                _mentions(code, [over, target], name, depth),
                lambda: _turn(code, statement, body, name, depth),
            )
        case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
            return _then(_mentions(code, items, name, depth), lambda: _first(code, body, name, depth))
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
            found = _first(code, body, name, depth)
            rest = [s for h in handlers for s in h.body] + orelse + finalbody
            return _then(found, lambda: OTHER if _named(rest, name) else NOTHING)
        case ast.Assign(targets=targets, value=value):
            return _then(_mentions(code, [value], name, depth), lambda: _mentions(code, targets, name, depth))
        case ast.AugAssign(target=target, value=value):
            found = _mentions(code, [value], name, depth)
            return _then(found, lambda: (Seen.READ, statement) if _is_or_item(target, name) else NOTHING)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Match() | ast.TryStar():
            return OTHER if _named([statement], name) else NOTHING
    return _mentions(code, [statement], name, depth)


def _turn(code: Code, loop: ast.stmt, body: Sequence[ast.stmt], name: str, depth: int) -> First:
    """A loop's body. `if first: write else: read`: what reads may run in later turns only."""
    found = _first(code, body, name, depth)
    at: ast.AST | None = found[1]
    while at is not None and at is not loop:
        above = code.parents.get(at)
        if isinstance(above, ast.If) and at is not above.test:
            other = above.orelse if at in above.body else above.body
            if found[0] is Seen.READ and _named(other, name):
                return OTHER
        at = above
    return found


def _then(found: First, others: Callable[[], First]) -> First:
    return found if found[0] is not Seen.NOTHING else others()


def _branches(code: Code, blocks: Sequence[Sequence[ast.stmt]], name: str, depth: int) -> First:
    found = [_first(code, block, name, depth) for block in blocks]
    for wanted in (Seen.READ, Seen.OTHER):
        for each in found:
            if each[0] is wanted:
                return each
    return NOTHING


def _named(roots: Sequence[ast.AST], name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for root in roots for n in every_node(root))


def _is_or_item(target: ast.expr, name: str) -> bool:
    """`x += y` and `x[i] += y` build on what is there."""
    inner = target.value if isinstance(target, ast.Subscript) else target
    return isinstance(inner, ast.Name) and inner.id == name


# Within an expression ---------------------------------------------------------------------------------------


def _mentions(code: Code, roots: Sequence[ast.AST], name: str, depth: int) -> First:
    """A read, if every mention that matters is one."""
    read: First = NOTHING
    for root in roots:
        for node in every_node(root):
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            seen = _mention(code, node, depth)
            if seen is Seen.OTHER:
                return OTHER
            if seen is Seen.READ and read[0] is Seen.NOTHING:
                read = (Seen.READ, node)
    return read


def _mention(code: Code, node: ast.expr, depth: int) -> Seen:
    parent = code.parents[node]
    match parent:
        case ast.BinOp(op=op) if isinstance(op, ARITHMETIC):
            return Seen.READ
        case ast.UnaryOp(op=ast.USub()):
            return Seen.READ
        case ast.Attribute(attr=attr) if attr in METADATA:
            return Seen.NOTHING
        case ast.Attribute(attr=attr) if attr in SAME_VALUES:
            return Seen.READ if _mention(code, parent, depth) is Seen.READ else Seen.OTHER
        case ast.Attribute(attr=attr):
            above = code.parents[parent]
            return _of_method(attr) if isinstance(above, ast.Call) and above.func is parent else Seen.OTHER
        case ast.Subscript(value=value, ctx=ast.Load()) if value is node:
            return _of_item(code, parent)
        case ast.Call() if node in parent.args:
            return _of_argument(code, parent, parent.args.index(node), depth)
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return Seen.NOTHING
    return Seen.OTHER


def _of_method(method: str) -> Seen:
    access = access_of(method)
    if access is Access.NEUTRAL:
        return Seen.NOTHING
    return Seen.READ if access is Access.READ else Seen.OTHER


def _of_item(code: Code, item: ast.Subscript) -> Seen:
    """An item in arithmetic, or copied into an item; elsewhere it may be a view that is written."""
    match code.parents[item]:
        case ast.BinOp(op=op) if isinstance(op, ARITHMETIC):
            return Seen.READ
        case ast.Assign(targets=[ast.Subscript()], value=value) if value is item:
            return Seen.READ
    return Seen.OTHER


def _of_argument(code: Code, call: ast.Call, position: int, depth: int) -> Seen:
    dotted = dotted_text(call.func) or ""
    module = code.origins.get(dotted.partition(".")[0], "").partition(".")[0]
    name = last_name(call.func)
    if any(keyword.arg == "out" for keyword in call.keywords) or "distributed" in dotted:
        return Seen.OTHER
    if module in MODULES and not COMPILED & set(dotted.split(".")):
        return Seen.READ if access_of(name) is Access.READ and not name.endswith("_") else Seen.OTHER
    if name in ("len", "type", "isinstance", "id"):
        return Seen.NOTHING
    callee = _defined_here(code, call) if depth else None
    if callee is None:
        return Seen.OTHER
    parameters = [arg.arg for arg in (*callee.args.posonlyargs, *callee.args.args)]
    if position >= len(parameters):
        return Seen.OTHER
    seen, _ = _first(code, callee.body, parameters[position], depth - 1)
    return seen


def _defined_here(code: Code, call: ast.Call) -> Function | None:
    """The one function at the top of this file that is called by its name."""
    if not isinstance(call.func, ast.Name):
        return None
    found = [f for f in code.functions if f.name == call.func.id and code.parents[f] is code.source.tree]
    return found[0] if len(found) == 1 else None
