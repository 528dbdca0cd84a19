"""Lists of leases of which one alone goes back: `rows = pool.take(n)`, and in the end `pool.put(rows[0])`; or
`left, right = pool.take_pair()`, and `pool.put(left)`, with no word of the other."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import assignments, awaited, given_to
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.name_bindings import FILLING
from auditor.source.nodes import walk

QUIET = LOGGING | {"print", "len", "bool", "min", "max", "sum", "range", "isinstance"}
"""Calls that look at a list and keep nothing of it."""


def only_the_first(function: Function, calls: Calls, call: ast.Call, ends: Set[str]) -> ast.Call | None:
    """The end that is told of one of them, where nothing else that keeps or gives back has the list."""
    name = _list_of(function, calls, call)
    if not name or sum(1 for _ in given_to(function, name)) != 1:
        return None
    ending = [each for each in function.calls if last_name(each) in ends]
    told = _ended(ending[0]) if len(ending) == 1 else None
    if told is None:
        return None
    parts = _parts(function, name)
    if isinstance(told, ast.Name) and told.id in parts:
        others = [each for each in parts if each != told.id]
        alone = all(_is_only_worked_with(function, each) for each in others)
        return ending[0] if others and alone and _is_taken_apart(function, name) else None
    match told:
        case ast.Subscript(value=ast.Name(id=listed), slice=ast.Constant(value=int() as at)) if (
            listed == name
        ):
            itself = any(_is_at(value, at, call) for value in given_to(function, name))
            borrowed = set(_borrowed_before(function, calls, ending[0]))
            alone = not parts and not itself and _is_only_looked_into(function, name, told, borrowed)
            return ending[0] if alone else None
    return None


def _ended(ending: ast.Call) -> ast.expr | None:
    """`rows[0]` of `pool.put(rows[0])`, or of `rows[0].drop()`."""
    match ending:
        case ast.Call(args=[told], keywords=[]):
            return told
        case ast.Call(func=ast.Attribute(value=told), args=[], keywords=[]):
            return told
    return None


def _borrowed_before(function: Function, calls: Calls, ending: ast.Call) -> Iterator[int]:
    """`rows` of `fold(rows)`, of which nothing is known: what goes back behind it had only been borrowed."""
    for call in function.calls:
        named = last_name(call)
        unknown = not calls.targets(function, call)[0] and named not in FILLING and named[:1].islower()
        if call.lineno < ending.lineno and unknown:
            yield from map(id, call.args)


def _list_of(function: Function, calls: Calls, call: ast.Call) -> str:
    """The name of the list that is made of such calls, or that the one call returns."""
    for target, value in assignments(function):
        if not isinstance(target, ast.Name):
            continue
        match awaited(value):
            case ast.ListComp(elt=made) if awaited(made) is call:
                return target.id
            case ast.List(elts=parts) if len(parts) > 1 and call in map(awaited, parts):
                return target.id
            case made if made is call and any(map(_returns_a_list, calls.targets(function, call)[0])):
                return target.id
    return ""


def _is_at(value: ast.expr, at: int, call: ast.Call) -> bool:
    """The first of `[pool.take(), pool.take()]` is what `[0]` gives back."""
    return isinstance(value, ast.List) and value.elts[at : at + 1] == [call]


def _returns_a_list(function: Function) -> bool:
    """Of more than one thing, `return [self.take() for _ in range(n)]`, or filled by turns."""
    returned = [node.value for node in function.statements if isinstance(node, ast.Return) and node.value]
    return any(isinstance(each, ast.ListComp) or _is_of_several(function, each) for each in returned)


def _is_of_several(function: Function, value: ast.expr) -> bool:
    match value:
        case ast.List(elts=[_, _, *_] as parts):
            makers = {_maker(function, each) for each in parts}
            return len(makers) == 1 and None not in makers
        case ast.Name(id=name):
            made = any(isinstance(each, ast.List) for each in given_to(function, name))
            return made and any(
                isinstance(each.func, ast.Attribute)
                and each.func.attr in FILLING
                and _is(each.func.value, name)
                and any(_holds(loop, each) for loop in function.statements)
                for each in function.calls
            )
    return False


def _maker(function: Function, part: ast.expr) -> str | None:
    """`self.take` of `self.take()`, and of a name that is given that once."""
    if isinstance(part, ast.Name):
        given = list(given_to(function, part.id))
        part = given[0] if len(given) == 1 else part
    made = awaited(part)
    return ast.unparse(made.func) if isinstance(made, ast.Call) else None


def _holds(loop: ast.stmt, call: ast.Call) -> bool:
    looping = isinstance(loop, ast.For | ast.AsyncFor | ast.While)
    return looping and any(each is call for part in getattr(loop, "body", []) for each in walk(part))


def _parts(function: Function, name: str) -> Sequence[str]:
    """`left` and `right` of `left, right = pair`."""
    for target, value in assignments(function):
        if isinstance(target, ast.Tuple) and _is(value, name):
            return [each.id for each in target.elts if isinstance(each, ast.Name)]
    return ()


def _is_taken_apart(function: Function, name: str) -> bool:
    """And nothing else is done with the list but to ask whether there is one."""
    return sum(_is(node, name) and isinstance(node.ctx, ast.Load) for node in _names(function)) <= 2


def _names(function: Function) -> Iterator[ast.Name]:
    return (node for node in function.nodes if isinstance(node, ast.Name))


def _is_only_worked_with(function: Function, name: str) -> bool:
    """`right.mem[:] = left.mem`: its parts are read and written, and nobody is told of it."""
    if name in ("", "_"):
        return name == "_"
    owned = {id(n.value) for n in function.nodes if isinstance(n, ast.Attribute | ast.Subscript)}
    reads = [node for node in _names(function) if _is(node, name) and isinstance(node.ctx, ast.Load)]
    asked = {id(call.func.value) for call in function.calls if isinstance(call.func, ast.Attribute)}
    return all(id(node) in owned and id(node) not in asked for node in reads)


def _is_only_looked_into(
    function: Function, name: str, ended: ast.Subscript, borrowed: Set[int] = frozenset()
) -> bool:
    """`if not rows`, `len(rows)`, `rows[0]`, `rows[1].view`: nobody keeps the list, or gets it, and whoever
    goes over it only works with what is there."""
    looked = {id(node.test) for node in function.nodes if isinstance(node, ast.If | ast.IfExp | ast.While)}
    looked |= {id(node.operand) for node in function.nodes if isinstance(node, ast.UnaryOp)}
    looked |= {id(node.left) for node in function.nodes if isinstance(node, ast.Compare)}
    looked |= {id(arg) for call in function.calls if last_name(call) in QUIET for arg in call.args}
    looked |= {id(node.slice) for node in function.nodes if isinstance(node, ast.Subscript)}  # `memory[rows]`
    looked |= {*_gone_over(function, name), *borrowed}
    owned = {id(node.value) for node in function.nodes if isinstance(node, ast.Attribute)}
    looked |= {
        id(node.value)
        for node in function.nodes
        if isinstance(node, ast.Subscript)
        and (id(node) in owned or ast.unparse(node.slice) == ast.unparse(ended.slice))
    }
    reads = [node for node in _names(function) if _is(node, name) and isinstance(node.ctx, ast.Load)]
    return all(id(node) in looked for node in reads)


def _gone_over(function: Function, name: str) -> Iterator[int]:
    """Where a loop goes over it, alone or beside another: `for row, x in zip(rows, xs): row.view[:] = x`."""
    for node in function.statements:
        match node:
            case ast.For(target=ast.Tuple(elts=parts), iter=ast.Call(func=ast.Name(id="zip"), args=lists)):
                pairs = list(zip(parts, lists, strict=False))
            case ast.For(target=part, iter=whole):
                pairs = [(part, whole)]
            case _:
                continue
        for each, over in pairs:
            if _is(over, name) and _is_only_worked_with(function, getattr(each, "id", "")):
                yield id(over)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
