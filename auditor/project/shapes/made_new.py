"""What a method makes anew, or numbers, where its store is empty."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, ways
from auditor.project.code.modules import last_part
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.name_bindings import mentions
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

MAKERS = frozenset({"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "tensor"})
"""Functions of torch and numpy that make a new tensor."""

OF_ARRAYS = frozenset({"torch", "np", "numpy"})

MAKING = frozenset({"make", "create", "new", "factory", "build", "connect", "open", "spawn", "reg",
                    "register", "alloc", "allocate", "malloc", "maker", "builder", "ctor", "dial", "boot",
                    "launch"})  # fmt: skip
"""Words in the names of methods and fields that make something new."""


VIEWING = frozenset({"view", "view_as", "narrow", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
                     "as_strided", "zero_", "fill_", "copy_", "requires_grad_", "share_memory_", "pin_memory",
                     "to", "cuda", "contiguous", "transpose", "permute", "t"})  # fmt: skip
"""Methods of a tensor that return it, a view of it, or the one that takes its place."""


def makes_where_empty(work: FieldWork, name: str, counters: set[str]) -> bool:
    """One of its ways out hands out something new, or the next number."""
    taken = {id(node) for each, node in work.taken if each == name}
    counted = counters.union(work.counters, (field for field, _ in work.counted))
    return hands_out_new(work, work.derived(frozenset(), taken), taken, counted) or any(
        is_new(value, counted) and not mentions(value, frozenset(), taken) for value in also_given(work)
    )


def hands_out_new(work: FieldWork, names: Set[str], marked: Set[int], counted: Set[str]) -> bool:
    """Whether it returns something new that has nothing to do with these names and expressions."""
    return any(
        is_new(way, counted)
        for value in (*work.returned, *also_given(work))
        for way in ways(value)
        if not mentions(way, names, marked)
    )


def also_given(work: FieldWork) -> Iterator[ast.expr]:
    """`buffer = self.idle.pop() if self.idle else bytearray(size)`, and the same in two statements; also of
    what a view is returned of, `out = base[:n]`."""
    values = (node for each in work.returned for node in walk(each))
    returned = {node.id for node in values if isinstance(node, ast.Name)} - work.told
    given = [(target.id, way) for target, value in (assignments(work.method) if returned else ())
             if isinstance(target, ast.Name) for way in ways(value)]  # fmt: skip
    while more := {whole for name, way in given if name in returned and (whole := _viewed(way))} - returned:
        returned |= more
    yield from (way for name, way in given if name in returned)


def _viewed(value: ast.expr) -> str | None:
    """The name of what this is a view of."""
    while (of := whole_of(value)) is not None:
        value = of
    return value.id if isinstance(value, ast.Name) else None


def whole_of(value: ast.expr) -> ast.expr | None:
    match value:
        case ast.Subscript(value=of):
            return of
        case ast.Call(func=ast.Attribute(value=of, attr=method)) if method in VIEWING:
            return of
    return None


def is_new(value: ast.expr, counted: Set[str]) -> bool:
    """`Channel(number)`, `torch.empty(size)`, `bytearray(size)`, `self.factory()`, a number counted up,
    `next(self.numbers)` of what counts; and views of them."""
    of = whole_of(value)
    if isinstance(of, ast.Call) and is_new(of, counted):
        return True
    match value:
        case ast.Attribute(value=ast.Name()) | ast.Name():
            return last_part(value) in counted
        case ast.BinOp(left=count, op=ast.Sub(), right=ast.Constant(value=1)):
            return is_new(count, counted)
        case ast.Call(func=ast.Name(id="next"), args=[ast.Attribute(value=ast.Name()) | ast.Name() as count]):
            return last_part(count) in counted
        case ast.Call(func=ast.Name(id=name)):
            return name[:1].isupper() or name in ("bytearray", "object") or not MAKING.isdisjoint(split(name))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy"), attr=attr), args=args):
            return attr in MAKERS and not (args and isinstance(args[0], ast.Constant) and args[0].value == 0)
        case ast.Call(func=ast.Attribute(attr=attr)):
            return attr[:1].isupper() or not MAKING.isdisjoint(split(attr))
    return False
