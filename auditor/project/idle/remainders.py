"""What is left of a hole that is cut in two, where it is kept only if it is large enough:

    offset, size = self.holes.pop(i)
    if size - wanted >= MIN_SPLIT:
        self.holes.insert(i, (offset + wanted, size - wanted))
    return Region(offset, wanted)

A rest below that is in no hole, and no part of the region that will come back. An allocator that means to
give it away hands out the whole of the hole then."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from auditor.flow.lease import Leak, Lease, Loss
from auditor.flow.trace import span_of
from auditor.model import Step
from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function, Module
from auditor.project.shapes.name_bindings import FILLING
from auditor.source.nodes import blocks_of, walk

PUTTING = FILLING | {"insort", "insort_left", "insort_right", "heappush"}
CUTTING = re.compile(r"\bif [^\n]+ >=? [^\n]+:\n[^\n]*(?:append|insert|insort\w*|heappush|add)\(")
LARGER = (ast.Gt, ast.GtE)
NOTHING_LEFT = "a rest below that is in no hole, and not part of what is handed out"


@dataclass(frozen=True)
class _Cut:
    """`taken` takes the hole out of `store` (`self.holes`), with names of its own in `parts`; `kept` keeps
    the rest, where that is at least as large as something, and `wanted` are names in the size that is cut
    off."""

    taken: ast.Call
    store: str
    parts: frozenset[str]
    kept: ast.If
    wanted: frozenset[str]


def may_cut_holes(text: str) -> bool:
    return ".pop(" in text and CUTTING.search(text) is not None


def remainders(module: Module) -> Iterator[Lease]:
    """Of functions that hand out a part of a hole, in a module of which others put holes back."""
    for function in sorted(module.by_node.values(), key=lambda each: each.qualname):
        if isinstance(function.node, ast.Module | ast.Lambda):
            continue
        for block in blocks(function):
            for cut in _cuts(function, block):
                end = _handed_out(function, block, cut)
                if end is not None and comes_back(module, function, cut.store):
                    yield _lease(function, cut, end)


def blocks(function: Function) -> Iterator[list[ast.stmt]]:
    for node in (function.node, *function.statements):
        if node is function.node or not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            yield from blocks_of(node)


def _cuts(function: Function, block: Sequence[ast.stmt]) -> Iterator[_Cut]:
    for at, statement in enumerate(block):
        taken = taken_out(statement)
        if taken is None:
            continue
        store = ast.unparse(taken.func.value) if isinstance(taken.func, ast.Attribute) else ""
        parts = frozenset(named_by(function, statement, store))
        for kept in block[at + 1 :]:
            if isinstance(kept, ast.If) and not kept.orelse and _keeps(kept, store):
                wanted = _wanted(function, kept.test, parts)
                if wanted:
                    yield _Cut(taken, store, parts, kept, frozenset(wanted))


def taken_out(statement: ast.stmt) -> ast.Call | None:
    """`offset, size = self.holes.pop(i)`, `self.holes.pop(i)`"""
    match statement:
        case (
            ast.Assign(value=ast.Call(func=ast.Attribute(attr="pop")) as call)
            | ast.Expr(value=ast.Call(func=ast.Attribute(attr="pop")) as call)
        ):
            return call
    return None


def named_by(function: Function, statement: ast.stmt, store: str) -> Iterator[str]:
    """By the statement, or by the loop over the store in which one was found."""
    if isinstance(statement, ast.Assign):
        yield from _names(statement.targets[0])
        return
    for loop in function.statements:
        if isinstance(loop, ast.For) and any(ast.unparse(part) == store for part in walk(loop.iter)):
            yield from _names(loop.target)


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in walk(node) if isinstance(each, ast.Name))


def _keeps(kept: ast.If, store: str) -> bool:
    """`self.holes.insert(i, rest)`, `insort(self.holes, rest)`"""
    for node in (each for part in kept.body for each in walk(part)):
        match node:
            case ast.Call(func=ast.Attribute(value=into, attr=way)) if way in PUTTING:
                if ast.unparse(into) == store or _is_first(node, store):
                    return True
            case ast.Call(func=ast.Name(id=way)) if way in PUTTING and _is_first(node, store):
                return True
    return False


def _is_first(call: ast.Call, store: str) -> bool:
    return bool(call.args) and ast.unparse(call.args[0]) == store


def _wanted(function: Function, test: ast.expr, parts: frozenset[str]) -> set[str]:
    """`wanted` of `size - wanted >= MIN_SPLIT`, also where the rest has a name. What is at least one, or more
    than nothing, is all there is."""
    match test:
        case ast.Compare(left=rest, ops=[op], comparators=[bound]) if isinstance(op, LARGER):
            if isinstance(bound, ast.Constant) and bound.value in (0, 1):
                return set()
            match _reckoned(function, rest):
                case [ast.BinOp(left=whole, op=ast.Sub(), right=cut)] if set(_names(whole)) & parts:
                    return set(_names(cut)) - parts
    return set()


def _reckoned(function: Function, rest: ast.expr) -> list[ast.expr]:
    """`size - wanted` of the test itself, of a name for it, and of `rest.size` where `rest = Hole(offset +
    wanted, size - wanted)`."""
    match rest:
        case ast.Name(id=name):
            return list(given_to(function, name))
        case ast.Attribute(value=ast.Name(id=name)):
            made = [each for each in given_to(function, name) if isinstance(each, ast.Call)]
            parts = [part for each in made for part in each.args]
            return [each for each in parts if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub)]
    return [rest]


def _handed_out(function: Function, block: Sequence[ast.stmt], cut: _Cut) -> ast.Return | None:
    """The `return` of what was wanted; None where the whole hole may be meant by then, `wanted = size`, or is
    handed on by its name."""
    after = block[block.index(cut.kept) + 1 :]
    line = cut.taken.lineno
    renamed = any(
        isinstance(node, ast.Name) and node.id in cut.wanted and isinstance(node.ctx, ast.Store)
        for node in function.nodes
        if getattr(node, "lineno", 0) > line
    )
    noted: set[str] = set()
    for statement in after if not renamed else ():
        match statement:
            case ast.Assign(targets=[ast.Subscript(slice=ast.Name(id=part))], value=ast.Name(id=size)):
                noted |= {size} if part in cut.parts else set()  # `self.live[offset] = wanted`
            case ast.Return(value=ast.expr() as value):
                names = noted | set(_names(value))
                return statement if names & cut.wanted and not _is_whole(function, value, cut) else None
    return None


def _is_whole(function: Function, value: ast.expr, cut: _Cut) -> bool:
    """`return hole`, `Region(hole, wanted)`: whoever has the hole itself knows how large it was."""
    read_off = {id(node.value) for node in walk(value) if isinstance(node, ast.Attribute | ast.Subscript)}
    whole = {name for name in cut.parts if _is_alone(function, name)}
    return any(
        isinstance(node, ast.Name) and node.id in whole and id(node) not in read_off for node in walk(value)
    )


def _is_alone(function: Function, name: str) -> bool:
    """Whether the hole itself has this name, of which parts are read: `hole.size`, `hole[1]`."""
    return any(
        isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for node in function.nodes
    )


def comes_back(module: Module, function: Function, store: str) -> bool:
    """Whether another function works on the store of that name."""
    field = store.rpartition(".")[2]
    return any(
        other is not function
        and any(
            (isinstance(node, ast.Attribute) and node.attr == field)
            or (isinstance(node, ast.Name) and node.id == field)
            for node in other.nodes
        )
        for other in module.by_node.values()
        if not isinstance(other.node, ast.Module) and other.name not in ("__init__", "__post_init__")
    )


def _lease(function: Function, cut: _Cut, end: ast.Return) -> Lease:
    ways = [(cut.kept.test, "kept only if it is large enough"), (end, NOTHING_LEFT)]
    return hole_lost(function, cut.taken, cut.store, ways)


def hole_lost(function: Function, taken: ast.expr, store: str, ways: Sequence[tuple[ast.AST, str]]) -> Lease:
    """What `taken` takes out of the store, lost in part; `ways` lead from there to the `return`, each place
    with what is to be said of it."""
    places = [(taken, "taken out here"), *ways]
    spans = [span_of(function.module.path, node, function.module.lines) for node, _ in places]
    steps = (
        Step(span.path, span.line, span.column, words) for span, (_, words) in zip(spans, places, strict=True)
    )
    return Lease(
        span=spans[0],
        symbol=function.qualname,
        text=" ".join(ast.unparse(taken).split()),
        protocol=function.cls.name if function.cls is not None else store,
        holder="",
        leaks=(Leak(Loss.RETURN, spans[-1], "", tuple(steps)),),
        handed_over=True,
    )
