"""Lists that a class fills before anybody asks for anything: what is in a backlog comes from elsewhere."""

import ast
import re
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.shapes.field_work import FieldWork, field_work
from auditor.project.shapes.markings import FREE
from auditor.project.shapes.name_bindings import FILLING
from auditor.project.shapes.owners import shared_by
from auditor.protocols.vocabulary import POOLS, singular, split
from auditor.source.nodes import walk

INITIAL = frozenset({"__init__", "__post_init__", "setup"})
BEGINNING = re.compile(
    r"_*(?:init|set_?up|prepare|configure|populate|warm_?up|provision)(?:_|$)|_*initiali[sz]e"
)
"""Names of methods and functions by which something is made ready."""

NUMBERING = frozenset({"range", "arange"})
TO_DO = frozenset({"task", "job", "work", "request", "prompt", "sample", "candidate", "example", "message"})
AROUND = frozenset({"list", "deque", "set", "sorted", "reversed", "tuple", "OrderedDict", "dict"})


def beginning(works: Sequence[FieldWork]) -> list[FieldWork]:
    """What runs first: the constructor, and the methods that it calls, or who asks for `cls()`."""
    first = [
        work for work in works if work.method.name in INITIAL or _makes_ready(work) or _makes_one(work.method)
    ]
    called = {name for work in first for name in _own_methods_called(work.method)}
    return first + [work for work in works if work.method.name in called]


def _makes_ready(work: FieldWork) -> bool:
    """By its name; not `fill(cells)`, which puts in what it is told."""
    named = BEGINNING.match(work.method.name) is not None
    return named and not any(isinstance(p.value, ast.Name) and work.is_from_told(p.value) for p in work.put)


def full_at_first(begun: Sequence[FieldWork], taker: Function, name: str) -> bool:
    """`self.slots = list(range(count))`, `for _ in range(count): self.slots.append(Slot())`, the same as the
    default of a dataclass's field."""
    body = taker.cls.node.body if taker.cls is not None else []
    of_module = shared_by(taker).get(name)
    return (
        any(_fills(work.method, name) for work in begun)
        or any(_is_default(each, name) for each in body)
        or (of_module is not None and _counts(of_module))
    )


def given_at_first(begun: Sequence[FieldWork], name: str) -> bool:
    """`self.resting = list(people)`, `for each in people: self.resting.put(each)`; a history begins empty."""
    return any(
        isinstance(node, ast.For) and _is_told(node.iter, work.told) and _within(node, name)
        for work in begun
        for node in work.method.statements
    ) or any(
        isinstance(target, ast.Attribute) and target.attr == name and _is_told(node.value, work.told)
        for work in begun
        for node in work.method.statements
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def given_to_a_pool(begun: Sequence[FieldWork], cls: Class | None, name: str, *, known: bool = False) -> bool:
    """The same of what is called a pool, or `known` as one: whoever makes one brings what it lends. What is
    to be done is not given back."""
    called_so = cls is not None and not POOLS.isdisjoint(split(cls.name))
    known = known and not _is_one_object(begun, name)
    return (called_so or known) and not things_to_do(cls) and given_at_first(begun, name)


def _is_one_object(begun: Sequence[FieldWork], name: str) -> bool:
    """`self.cache = cache` is no store that is filled."""
    return any(
        isinstance(target, ast.Attribute) and target.attr == name and isinstance(node.value, ast.Name)
        for work in begun
        for node in work.method.statements
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def things_to_do(cls: Class | None, *fields: str) -> bool:
    """Whether the names speak of work."""
    names = (cls.name if cls is not None else "", *fields)
    return not TO_DO.isdisjoint(singular(word) for name in names for word in split(name))


def _is_told(value: ast.expr, told: Set[str]) -> bool:
    """Not `[0] * count`, which holds nothing that was told."""
    if isinstance(value, ast.BinOp):
        return False
    parts = list(walk(value))
    chosen = [
        each.orelse for each in parts if isinstance(each, ast.IfExp)
    ]  # what it has if it is told nothing
    instead = {id(part) for each in chosen for part in walk(each)}
    calls = [part for part in parts if isinstance(part, ast.Call) and id(part) not in instead]
    around = all(last_part(part.func) in AROUND for part in calls)
    return around and any(isinstance(part, ast.Name) and part.id in told for part in parts)


def takes_work(taker: Function) -> bool:
    """`self.jobs.popleft()`: what is to be done is no thing that goes back."""
    taken = {name for name, _ in field_work(taker).taken}
    return bool(taken) and all(things_to_do(None, name) and FREE.isdisjoint(split(name)) for name in taken)


def true_at_first(begun: Sequence[FieldWork], name: str) -> bool:
    """`self.open = [True] * count`, `torch.ones(count, dtype=torch.bool)`: who takes a place clears it."""
    return any(_all_alike(value, on=True) for value in _given_at_first(begun, name))


def false_at_first(begun: Sequence[FieldWork], name: str) -> bool:
    """`self.bits = [False] * count`, `bytearray(count)`: who takes a place marks it."""
    return any(_all_alike(value, on=False) for value in _given_at_first(begun, name))


def _given_at_first(begun: Sequence[FieldWork], name: str) -> Iterator[ast.expr]:
    for work in begun:
        for node in work.method.statements:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(each, ast.Attribute) and each.attr == name for each in targets):
                    yield node.value


def _all_alike(value: ast.expr, *, on: bool) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(attr=made) | ast.Name(id=made)):
            return made == "ones" if on else made in ("zeros", "bytearray")
        case ast.BinOp(left=ast.List(elts=[ast.Constant(value=each)]), op=ast.Mult()):
            return bool(each) is on and each is not None
        case ast.ListComp(elt=ast.Constant(value=each)):
            return bool(each) is on and each is not None
    return False


def _makes_one(method: Function) -> bool:
    return "classmethod" in method.decorators and any(
        isinstance(call.func, ast.Name) and call.func.id == method.owner for call in method.calls
    )


def _own_methods_called(method: Function) -> Iterator[str]:
    own = method.owner
    for call in method.calls:
        if own is not None and (name := own_attribute(call.func, own)) is not None:
            yield name


def _fills(method: Function, name: str) -> bool:
    for node in method.statements:
        match node:
            case (
                ast.Assign(
                    targets=[ast.Attribute(attr=attr) | ast.Subscript(value=ast.Attribute(attr=attr))],
                    value=value,
                )
                | ast.AnnAssign(target=ast.Attribute(attr=attr), value=ast.expr() as value)
            ) if attr == name and (_counts(value) or _makes_each(value)):
                return True
            case ast.Expr(value=ast.Call(args=args)) if _is_filled(node, name) and any(map(_counts, args)):
                return True
            case ast.For(iter=over) if _within(node, name, made=not _counts(over)):
                return True
            case ast.For(iter=ast.Attribute(attr=other)) if other != name and _within(node, name):
                if _fills(method, other):
                    return True  # `for slot in self.slots: self.blank.put(slot.index)`
            case ast.While(test=test) if _measures(test, name) and _within(node, name):
                return True
    return False


def _within(loop: ast.For | ast.While, name: str, *, made: bool = False) -> bool:
    return any(_is_filled(node, name, made=made) for node in walk(loop))


def _is_filled(node: ast.AST, name: str, *, made: bool = False) -> bool:
    """`made`: by objects that are made there."""
    match node:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Attribute(attr=attr), attr=way), args=[*_, put])
        ) if attr == name and way in FILLING:
            return _is_made(put) if made else not isinstance(put, ast.Constant | ast.Tuple)
        case ast.Assign(targets=[ast.Subscript(value=ast.Attribute(attr=attr))], value=put) if attr == name:
            return _is_made(put)
    return False


def _is_made(value: ast.expr) -> bool:
    """`Sandbox(name)`"""
    return isinstance(value, ast.Call) and last_part(value.func).lstrip("_")[:1].isupper()


def _makes_each(value: ast.expr) -> bool:
    """`[Link(address) for address in addresses]`; `[(0, size)]` or `[Hole(0, size)]`, one extent of all there
    is."""
    match value:
        case ast.ListComp(elt=made) | ast.DictComp(value=made):
            return _is_made(made)
        case ast.Call(func=func, args=[ast.GeneratorExp(elt=made) | ast.ListComp(elt=made), *_]):
            return last_part(func) in AROUND and _is_made(made)
        case ast.List(elts=[ast.Tuple(elts=[ast.Constant(value=0), _])]):
            return True
        case ast.List(elts=[ast.Call(args=[ast.Constant(value=0), *_]) as made]):
            return _is_made(made)
    return False


def _is_default(statement: ast.stmt, name: str) -> bool:
    match statement:
        case (
            ast.AnnAssign(target=ast.Name(id=field), value=ast.expr() as value)
            | ast.Assign(targets=[ast.Name(id=field)], value=value)
        ):
            return field == name and _counts(value)
    return False


def _counts(node: ast.expr) -> bool:
    return any(
        (isinstance(each, ast.Name) and each.id in NUMBERING)
        or (isinstance(each, ast.Attribute) and each.attr in NUMBERING)
        for each in walk(node)
    )


def _measures(test: ast.expr, name: str) -> bool:
    """`while len(self.slots) < count:`"""
    return any(isinstance(each, ast.Attribute) and each.attr == name for each in walk(test))
