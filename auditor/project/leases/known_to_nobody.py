"""What a function does with a name of its own that lets nobody else know what it stands for.

record = Record(slot, size)
out.append(record)                    # a list of the function's own
log.info("%d of %s", len(out), record)
total = sum(each.size for each in out)
return sorted(out, key=order)
"""

import ast
from collections.abc import Iterator, Set

from auditor.flow.knowledge import EXTENDING, FILLING
from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import assigned_by, given_to, ways
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.shapes.pool_state import own_parameters

ORDERING = frozenset({"list", "tuple", "sorted", "reversed", "deque"})
"""Builtins whose result is a list of the same."""

COLLECTIONS = ORDERING | {"dict", "OrderedDict", "set"}
"""What makes an empty one."""

SAYING = frozenset({"len", "bool", "print", "str", "repr", "sum", "any", "all", "isinstance"})
"""Builtins that keep nothing, and whose answers lead to nothing."""

SHOWING = frozenset({"values", "items", "get", "copy"})
"""Methods of a table by which others come to what is in it."""

Told = tuple[Function, str]
"""A function, and the parameter by which it knows what it is told of."""


def is_known_to_nobody(
    recogniser: Recogniser,
    function: Function,
    name: str,
    seen: tuple[str, ...] = (),
    told: Set[int] = frozenset(),
) -> bool:
    """Plain assignments bind the name, and all that is done with it is `context.engine`, a question whether
    it is there, another name for it, a place in a list of this function, `return context`, and calls of
    functions that only touch it; `told` are operands of calls of which that is known."""
    named = _named(function, name)
    harmless = {id(part) for node in function.nodes for part in touched(node)} | told
    harmless.update(id(part) for part in _shown(recogniser, function, name))
    harmless.update(id(part) for part in _put_aside(recogniser, function, name, (*seen, name)))
    harmless.update(id(part) for part in _told_to_listeners(function))
    harmless.update(id(over) for over in _gone_over(function, harmless))
    read = [node for node in named if isinstance(node.ctx, ast.Load)]
    bound = len(list(given_to(function, name))) + sum(_is_begun(node, name) for node in function.nodes)
    return len(named) - len(read) == bound and all(id(node) in harmless for node in read)


def elements(value: ast.expr) -> list[ast.expr] | None:
    """What a list or a table holds that is made right there."""
    match value:
        case ast.List(elts=given) | ast.Tuple(elts=given) | ast.Dict(values=given):
            return given
        case ast.ListComp(elt=element) | ast.DictComp(value=element):
            return [element]
        case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in COLLECTIONS:
            return []
    return None


def put_into(function: Function, name: str) -> Iterator[ast.expr]:
    """What comes into a list, or a table, that is called so."""
    for call in function.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=box), attr=way), args=[*_, value]) if (
                box == name and way in FILLING | {"setdefault"}
            ):
                yield value
            case ast.Call(func=ast.Attribute(value=ast.Name(id=box), attr=way), args=args) if (
                box == name and way in EXTENDING
            ):
                given = elements(args[0]) if len(args) == 1 else None
                yield from given if given is not None else [call]  # of things that have been elsewhere
    for node in function.statements:
        match node:
            case ast.AugAssign(target=ast.Name(id=box), value=value) if box == name:
                given = elements(value)
                yield from given if given is not None else [value]
            case ast.Assign():
                yield from (value for target, value in assigned_by(node) if _box_of(target) == name)


def _named(function: Function, name: str) -> list[ast.Name]:
    return [node for node in function.of_kind(ast.Name) if node.id == name]


def _is_begun(node: ast.AST, name: str) -> bool:
    """`best: Draft | None`, `out += [record]`."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=begun), value=None) | ast.AugAssign(target=ast.Name(id=begun)):
            return begun == name
    return False


def touched(node: ast.AST) -> list[ast.expr | None]:
    """Parts of the node that nobody hears of by it, or hears of as what the function returns."""
    match node:
        case ast.Return(value=ast.Tuple(elts=values)):
            return list(values)
        case ast.Return(value=ast.Call(func=ast.Name(id=name), args=[value, *_])) if name in ORDERING:
            return [value]
        case ast.Return(value=ast.Subscript(value=value, slice=ast.Slice())):
            return [value]
        case ast.Attribute(value=ast.Subscript(value=value)):
            return [value]  # `out[-1].size`
        case ast.Attribute(value=value, attr=way):
            return [value] if way not in SHOWING else []
        case ast.Subscript(value=value, ctx=ast.Store()):
            return [value]
        case (
            ast.Return(value=value)
            | ast.Yield(value=value)
            | ast.UnaryOp(op=ast.Not(), operand=value)
            | ast.FormattedValue(value=value)
        ):
            return [value]
        case ast.Compare(left=value, comparators=[ast.Constant(value=None)]):
            return [value]
        case ast.Assign():
            return [value for target, value in assigned_by(node) if isinstance(target, ast.Name)]
        case ast.If(test=test) | ast.While(test=test) | ast.Assert(test=test) | ast.IfExp(test=test):
            return [test]
        case ast.BoolOp(values=values):
            return list(values)
        case ast.Call(func=ast.Name(id=name), args=args) if name in SAYING:
            return list(args)
        case ast.Call(func=ast.Attribute(attr=name), args=args) if name in LOGGING:
            return list(args)
    return []


def _gone_over(function: Function, harmless: set[int]) -> Iterator[ast.expr]:
    """`out` of `for each in out:` and of `sum(each.size for each in out)`, where what is done with each is no
    more than that."""
    for node in function.nodes:
        if not isinstance(node, ast.For | ast.comprehension):
            continue
        each = node.target.elts[-1] if isinstance(node.target, ast.Tuple) else node.target
        over = _passed(node.iter)
        if isinstance(each, ast.Name) and all(
            isinstance(one.ctx, ast.Store) or id(one) in harmless for one in _named(function, each.id)
        ):
            yield over


def _passed(over: ast.expr) -> ast.expr:
    """`out` of `enumerate(out)`, of `out.values()` and of `out.items()`."""
    match over:
        case ast.Call(func=ast.Name(id="enumerate" | "reversed"), args=[inner, *_]):
            return inner
        case ast.Call(func=ast.Attribute(value=inner, attr="values" | "items"), args=[]):
            return inner
    return over


def _put_aside(
    recogniser: Recogniser, function: Function, name: str, seen: tuple[str, ...]
) -> Iterator[ast.expr]:
    """`record` of `out.append(record)` and of `out[key] = record`, where nobody else knows `out`."""
    boxes: dict[str, list[ast.expr]] = {}
    for call in function.calls:
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=box), attr=way), args=[*_, ast.Name(id=put) as given]
            ) if put == name and way in FILLING:
                boxes.setdefault(box, []).append(given)
    for node in function.statements:
        for target, value in assigned_by(node):
            if isinstance(value, ast.Name) and value.id == name and (into := _box_of(target)) is not None:
                boxes.setdefault(into, []).append(value)
    for box, values in boxes.items():
        made = [way for each in given_to(function, box) for way in ways(each)]
        own = bool(made) and all(elements(each) is not None for each in made)
        if own and (box in seen or is_known_to_nobody(recogniser, function, box, seen)):
            yield from values


def _box_of(target: ast.expr) -> str | None:
    match target:
        case ast.Subscript(value=ast.Name(id=box)):
            return box
    return None


def _shown(recogniser: Recogniser, function: Function, name: str) -> Iterator[ast.expr]:
    """Arguments called so that no function does anything with but touch its fields, or show it to such
    another."""
    for argument, told in _told_of(recogniser, function, name):
        if told is not None and _only_touch(recogniser, told):
            yield argument


def _told_of(
    recogniser: Recogniser, function: Function, name: str
) -> Iterator[tuple[ast.expr, list[Told] | None]]:
    """Each argument of a call that is the name, and what those that may be called know it by: none where one
    is not known."""
    for call in function.calls:
        for position, argument in enumerate(call.args):
            if isinstance(argument, ast.Name) and argument.id == name:
                targets = recogniser.calls.targets(function, call)[0]
                known = [(to, own_parameters(to)[position : position + 1]) for to in targets]
                whole = bool(known) and all(one for _, one in known)
                yield argument, [(to, one[0]) for to, one in known] if whole else None


def _only_touch(recogniser: Recogniser, told: list[Told]) -> bool:
    """Of all who come to hear of it, each asked once: of long chains of calls there are more ways through
    than functions."""
    waiting, asked = list(told), set(told)
    while waiting:
        target, name = waiting.pop()
        returned = {
            id(each) for node in target.nodes if isinstance(node, ast.Return) for each in touched(node)
        }
        harmless = {id(part) for node in target.nodes for part in touched(node)} - returned
        for argument, further in _told_of(recogniser, target, name):
            if further is None:
                continue
            harmless.add(id(argument))
            waiting += [each for each in further if each not in asked]
            asked.update(further)
        if not all(isinstance(node.ctx, ast.Load) and id(node) in harmless for node in _named(target, name)):
            return False
    return True


def _told_to_listeners(function: Function) -> Iterator[ast.expr]:
    """`for hook in self.hooks: hook(response)`: of several that are told, and not asked for anything, none
    has got it."""
    told = {
        node.target.id
        for node in function.statements
        if isinstance(node, ast.For)
        and isinstance(node.target, ast.Name)
        and isinstance(node.iter, ast.Attribute)
    }
    for node in function.statements:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args)) if name in told:
                yield from args
