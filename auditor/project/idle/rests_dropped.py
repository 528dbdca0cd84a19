"""Holes of which a part is handed out, and nothing is kept of the rest:

    offset, size = self.holes.pop(i)
    return Region(offset, min(size, LIMIT))

Only of stores that hold spans: all that there is lies in one at first, or others keep what they leave."""

import ast
from collections.abc import Iterator

from auditor.flow.lease import Lease
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function, Module
from auditor.project.idle.remainders import PUTTING, hole_lost
from auditor.project.shapes.spans import is_whole
from auditor.source.nodes import walk

NOTHING_KEPT = "what is left of the hole is in no hole, and not part of what is handed out"


def rests_dropped(module: Module) -> Iterator[Lease]:
    for function in sorted(module.by_node.values(), key=lambda each: each.qualname):
        if isinstance(function.node, ast.Module | ast.Lambda):
            continue
        for taken, store in _taken(function):
            if _puts(function, store) or not _holds_spans(module, store):
                continue
            for end in function.of_kind(ast.Return):
                if any(
                    _hands_out_a_part(function, end, begin, size)
                    for begin, size in _parts(function, taken, store)
                ):
                    yield hole_lost(function, taken, store, [(end, NOTHING_KEPT)])
                    break


def _taken(function: Function) -> Iterator[tuple[ast.expr, str]]:
    """What takes a hole out, with the last name of the store: `self.holes.pop(i)`, `del self.holes[i]`."""
    for node in function.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=store, attr="pop"), args=[_]):
                yield node, _last(store)
            case ast.Delete(targets=[ast.Subscript(value=store) as taken]):
                yield taken, _last(store)


def _last(store: ast.expr) -> str:
    """`holes` of `self.holes`, `holes` and `holes[name]`"""
    while isinstance(store, ast.Subscript):
        store = store.value
    return getattr(store, "attr", getattr(store, "id", ""))


def _puts(function: Function, store: str) -> bool:
    """Anything into the store, by a call or an assignment."""
    return any(_is_put(node, store) for node in function.nodes)


def _is_put(node: ast.AST, store: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=into, attr=way), args=[*_]) if way in PUTTING:
            return _last(into) == store or any(_last(each) == store for each in node.args[:1])
        case ast.Call(func=ast.Name(id=way), args=[into, *_]) if way in PUTTING:
            return _last(into) == store
        case ast.Subscript(value=into, ctx=ast.Store()):
            return _last(into) == store
        case ast.Attribute(ctx=ast.Store()):
            return node.attr == store
    return False


def _holds_spans(module: Module, store: str) -> bool:
    """Others put something in, and know how large it is: `self.holes = [(0, size)]`, or they keep a rest."""
    functions = [each for each in module.by_node.values() if store in each.text]
    whole = any(
        _last(target) == store and is_whole(value)
        for each in functions
        for target, value in assignments(each)
    )
    rests = any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)
        for each in functions
        for node in each.of_kind(ast.Call)
        if _is_put(node, store)
        for part in walk(node)
    )
    return (whole or rests) and any(_puts(each, store) for each in functions if each.name != "__init__")


def _parts(function: Function, taken: ast.expr, store: str) -> Iterator[tuple[str, str]]:
    """`offset` and `size`, by the statement that takes, or by the loop in which one was found; of records
    the first two of their fields that the function reads."""
    bound = [target for target, value in assignments(function) if value is taken]
    bound += [
        loop.target
        for loop in function.of_kind(ast.For)
        if any(isinstance(each, ast.expr) and _last(each) == store for each in walk(loop.iter))
    ]
    for target in bound:
        for node in walk(target):
            match node:
                case ast.Tuple(elts=[ast.Name(id=begin), ast.Name(id=size)]):
                    yield begin, size


def _hands_out_a_part(function: Function, end: ast.Return, begin: str, size: str) -> bool:
    """It begins where the hole begins, and is as large as is wanted, or as a limit says: the size of the hole
    is asked for, and goes nowhere."""
    named = {node.id for node in walk(end) if isinstance(node, ast.Name)}
    if begin not in named:
        return False
    reads = [n for n in function.of_kind(ast.Name) if n.id == size and isinstance(n.ctx, ast.Load)]
    limited = {id(each) for each in _limited(function)}
    compared = {id(each) for each in _held_against_what_is_told(function)}
    return bool(reads) and all(id(each) in limited | compared for each in reads)


def _limited(function: Function) -> Iterator[ast.expr]:
    """`min(size, LIMIT)`"""
    for call in function.calls:
        if isinstance(call.func, ast.Name) and call.func.id == "min" and len(call.args) == 2:
            yield from call.args


def _held_against_what_is_told(function: Function) -> Iterator[ast.expr]:
    """`size >= wanted`, `size < wanted`"""
    for compared in function.of_kind(ast.Compare):
        sides = (compared.left, *compared.comparators)
        told = any(getattr(side, "id", "") in function.parameters for side in sides)
        if told and isinstance(compared.ops[0], ast.Gt | ast.GtE | ast.Lt | ast.LtE):
            yield from sides
