"""Containers that a method shortens without a look at what goes: `self.held = self.held[:4]`, a deque with a
length that it fills again, a dict that it makes anew of some keys."""

import ast
from collections.abc import Callable, Iterator, Sequence

from auditor.ir.tables import GOING_OVER
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.forgetting import for_good
from auditor.project.fields.mere_looks import Looks
from auditor.project.fields.picked_out import picks_some
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

FROM_AN_END = frozenset({"popitem", "popleft", "pop"})
FILLING = frozenset({"append", "appendleft", "add", "insert", "extend"})
ORDERING = frozenset({"sort", "reverse", "move_to_end"})


def cut_off(project: Project, method: Function, attribute: str, record: str = "") -> Iterator[ast.stmt]:
    """The statements that do so, in a method that gives nothing back and looks at nothing inside: with a
    field of its own, or with that of a `record`."""
    own = record or method.owner
    if own is None or any(looks_releasing(call) for call in method.calls):
        return
    bounded = not record and _has_a_length(method, attribute)
    shortening = [
        node
        for node in method.statements
        if _shortens(node, own, attribute)
        or keeps_the_first(method, node, lambda each: _is(each, own, attribute))
        or (bounded and _appends(node, own, attribute))
        or (_keeps_some_keys(node, own, attribute) and for_good(project, method))
        or (picks_some(method, node, own, attribute) and for_good(project, method))
    ]
    known = [*shortening, *(value for _, value in orderings(method, lambda n: _is(n, own, attribute)))]
    if shortening and not _looks_inside(method, own, attribute, known):
        yield from shortening


def _shortens(node: ast.stmt, own: str, attribute: str) -> bool:
    match node:
        case ast.Assign(targets=[target], value=ast.Subscript(value=whole, slice=ast.Slice())):
            return _is(target, own, attribute) and _is(whole, own, attribute)
        case (
            ast.Assign(targets=[ast.Subscript(value=whole, slice=ast.Slice())], value=ast.List(elts=[]))
            | ast.Delete(targets=[ast.Subscript(value=whole, slice=ast.Slice())])
        ):
            return _is(whole, own, attribute)
        case ast.Expr(value=ast.Call(args=[whole]) as call) if last_name(call) == "heappop":
            return _is(whole, own, attribute)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr=way), args=args)):
            found = all(_is_number(arg) or _is_the_first(arg, own, attribute) for arg in args)
            return way in FROM_AN_END and _is(whole, own, attribute) and found
    return False


def keeps_the_first(method: Function, node: ast.stmt, is_it: Callable[[ast.expr], bool]) -> bool:
    """`self.beams = sorted(self.beams, key=score)[:width]`, or `ranked[:width]` of a name for that, or what
    `nlargest` leaves of it; nobody goes over the rest."""
    match node:
        case ast.Assign(targets=[target], value=ast.Subscript(value=whole, slice=ast.Slice(step=None))):
            named = dict(orderings(method, is_it))
            name = getattr(whole, "id", "")
            ordered = _is_ordered(whole, is_it) or name in named
            return is_it(target) and ordered and not _is_gone_over(method, name, node)
        case ast.Assign(targets=[target], value=ast.Call(args=[_, whole, *_]) as call):
            return last_name(call) in ("nlargest", "nsmallest") and is_it(target) and is_it(whole)
    return False


def orderings(method: Function, is_it: Callable[[ast.expr], bool]) -> Iterator[tuple[str, ast.expr]]:
    for target, value in assignments(method):
        if isinstance(target, ast.Name) and _is_ordered(value, is_it):
            yield target.id, value


def _is_ordered(value: ast.expr, is_it: Callable[[ast.expr], bool]) -> bool:
    match value:
        case ast.Call(func=ast.Name(id="sorted"), args=[whole]):
            return is_it(whole)
    return False


def _is_gone_over(method: Function, name: str, cutting: ast.stmt) -> bool:
    """Beyond a look at one of them, `ranked[0].score`."""
    looked = {id(each) for each in walk(cutting)}
    for node in method.nodes:
        match node:
            case (
                ast.Subscript(value=ast.Name() as whole, slice=ast.Constant() | ast.BinOp() | ast.UnaryOp())
                | ast.If(test=ast.Name() as whole)
                | ast.IfExp(test=ast.Name() as whole)
                | ast.Call(func=ast.Name(id="len"), args=[ast.Name() as whole])
            ):
                looked.add(id(whole))
    named = (node for node in method.nodes if isinstance(node, ast.Name) and node.id == name)
    return any(isinstance(node.ctx, ast.Load) and id(node) not in looked for node in named)


def _has_a_length(method: Function, attribute: str) -> bool:
    """`self.recent = deque(maxlen=limit)`: one more, and the first is gone."""
    init = method.cls.methods.get("__init__") if method.cls is not None else None
    for node in init.statements if init is not None else ():
        match node:
            case (
                ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(keywords=[length]))
                | ast.AnnAssign(target=ast.Attribute(attr=name), value=ast.Call(keywords=[length]))
            ) if name == attribute:
                fixed = not isinstance(length.value, ast.Constant) or length.value.value is not None
                return length.arg == "maxlen" and fixed
    return False


def _appends(node: ast.stmt, own: str, attribute: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr="append" | "appendleft"))):
            return _is(whole, own, attribute)
    return False


def _keeps_some_keys(node: ast.stmt, own: str, attribute: str) -> bool:
    """`self.tables = {key: table for key, table in self.tables.items() if key in survivors}`: whoever says
    which are to stay has not ended the others; who says which are to go may have."""
    match node:
        case ast.Assign(
            targets=[target],
            value=ast.DictComp(
                key=ast.Name(id=key),
                generators=[
                    ast.comprehension(
                        iter=ast.Call(func=ast.Attribute(value=whole, attr="items")),
                        ifs=[ast.Compare(left=asked, ops=[way], comparators=[kept])],
                    )
                ],
            ),
        ):
            same = _is(target, own, attribute) and _is(whole, own, attribute)
            return same and _says_which_stay(asked, way, kept, key, own)
    return False


def _says_which_stay(asked: ast.expr, way: ast.cmpop, kept: ast.expr, key: str, own: str) -> bool:
    """`key in survivors`, or `self.used[key] >= edge`: who is younger than that."""
    match asked:
        case ast.Name(id=name):
            return name == key and isinstance(way, ast.In) and isinstance(kept, ast.Name)
        case ast.Subscript(value=table, slice=ast.Name(id=name)):
            later = isinstance(way, ast.Gt | ast.GtE | ast.Lt | ast.LtE)
            return later and name == key and own_attribute(table, own) is not None
    return False


def _looks_inside(method: Function, own: str, attribute: str, shortening: Sequence[ast.AST]) -> bool:
    """Beyond asking how much there is, or for what stands under a name, and putting more in."""
    nodes = list(method.nodes)
    is_table = method.cls is not None and attribute in method.cls.tables  # its keys lead to nothing
    known = {id(each) for statement in shortening for each in walk(statement)}
    for node in nodes:
        match node:
            case (
                ast.Call(func=ast.Name(id="len"), args=[each])
                | ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[each])
            ):
                known.add(id(each))
            case ast.Call(func=ast.Attribute(value=each, attr=way)) if way in FILLING | ORDERING:
                known.add(id(each))
            case (
                ast.Subscript(value=each, ctx=ast.Store())
                | ast.Subscript(value=each, slice=ast.Name())
                | ast.Call(func=ast.Attribute(value=each, attr="get"), args=[ast.Name(), *_])
            ):
                known.add(id(each))
            case ast.While(test=test):
                known |= {id(each) for each in _asked_of(test)}
            case ast.comprehension(iter=each) if is_table:
                known.add(id(each))
            case ast.Call(func=ast.Name(id=name), args=[each, *_]) if is_table and name in GOING_OVER:
                known.add(id(each))
    looks = Looks(method, attribute)
    return any(
        isinstance(node, ast.expr)
        and _is(node, own, attribute)
        and id(node) not in known
        and not looks.only_looks(node)
        for node in nodes
    )


def _asked_of(test: ast.expr) -> Iterator[ast.expr]:
    """`while self.heap and self.heap[0][0] <= now:`: whether there is one, and whether its time has come."""
    for asked in test.values if isinstance(test, ast.BoolOp) else [test]:
        match asked:
            case ast.Compare(left=first, ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()]):
                yield from (each for each in walk(first) if isinstance(each, ast.expr))
            case _:
                yield asked


def _is(node: ast.expr, own: str, attribute: str) -> bool:
    return own_attribute(node, own) == attribute


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    )


def _is_the_first(key: ast.expr, own: str, attribute: str) -> bool:
    """`next(iter(self.table))`: the oldest one."""
    match key:
        case ast.Call(func=ast.Name(id="next"), args=[ast.Call(func=ast.Name(id="iter"), args=[whole])]):
            return _is(whole, own, attribute)
    return False
