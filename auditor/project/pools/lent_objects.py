"""Objects that a pool hands out and that end themselves: `handle = pool.acquire()`, `handle.release()`."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Handle
from auditor.project.code.annotations import type_named
from auditor.project.code.bindings import assignments, given_to, own_attribute, ways
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.pools.halves import LENDING, Half, Pair, hands_out
from auditor.project.pools.queues import POOL_WORDS
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.full_at_first import AROUND
from auditor.project.shapes.pool_state import REMOVERS, changes_state
from auditor.protocols.vocabulary import (
    ACQUIRE_WORDS,
    COUNTING,
    HANDING_OUT,
    LEASE_METHODS,
    WEAK,
    Name,
    split,
    take_apart,
    undoes,
)
from auditor.source.nodes import walk

FILLING = frozenset({"append", "appendleft", "add", "put", "put_nowait", "insert", "push"})
BY_THEMSELVES = frozenset({"finalize", "ref", "WeakValueDictionary"})
"""What the standard library has for a pool to see to it that a dropped object comes back."""


def self_ending(model: ClassModel, cls: Class, methods: list[Function]) -> Iterator[Pair]:
    """The pool has no release of its own: what it hands out has one."""
    for method in methods:
        name = take_apart(method.name, ACQUIRE_WORDS - COUNTING)
        if method.is_abstract or LENDING & set(method.decorators):
            continue
        if name is None and HANDING_OUT.isdisjoint(split(method.name)[:1]):
            continue  # `start()` may return a service, which has a `close()`
        weak = name is not None and name.verb in WEAK and POOL_WORDS.isdisjoint(split(cls.name))
        if weak or not (hands_out(method, name, []) if name is not None else changes_state(method)):
            continue
        lent = lent_class(model, cls, method)
        other = (
            lent is not cls or "classmethod" in method.decorators
        )  # `acquire()` may return the object itself
        ends = list(endings_of(lent)) if lent is not None and other else []
        if name is None:
            name = Name("acquire", frozenset())
            ends = [end for end in ends if undoes(end.name, method.name)]
        if ends:
            releases = tuple(Half(end, Name("release", frozenset()), Handle.RECEIVER) for end in ends)
            yield Pair(cls.name, cls, (Half(method, name),), releases)


def lent_class(model: ClassModel, pool: Class | None, method: Function) -> Class | None:
    """The class of what a pool's method returns, unless dropping it is enough to give it back."""
    if comes_back_when_dropped(method):
        return None
    returns = getattr(method.node, "returns", None)
    found = type_named(model.project, (method.module, returns)) if returns is not None else None
    if not isinstance(found, Class):
        found = next(
            (cls for value in _returned(method) if (cls := _class_of(model, pool, method, value))), None
        )
    return found if found is None or "__del__" not in found.methods else None


def comes_back_when_dropped(method: Function) -> bool:
    """`weakref.finalize(lease, self.put, number)`; not `self.tables.ref(number)`, which counts one more."""
    return any(
        isinstance(call.func, ast.Name) or getattr(getattr(call.func, "value", None), "id", "") == "weakref"
        for call in method.of_kind(ast.Call)
        if last_part(call.func) in BY_THEMSELVES
    )


def endings_of(cls: Class) -> Iterator[Function]:
    """Its methods that give it back: named so, told nothing, speaking to somebody or changing state."""
    for name, method in sorted(cls.methods.items()):
        ends = name in LEASE_METHODS and needs_nothing(method) and not method.is_abstract
        if ends and (changes_state(method) or _speaks(method)):
            yield method


def needs_nothing(method: Function) -> bool:
    node = method.node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or method.is_static:
        return False
    return len(method.parameters) - len(node.args.defaults) <= 1


def goes_straight_on(method: Function) -> bool:
    """Whatever it does it does each time, unless it raises or did so before (`if self.closed: return`):
    `commit(used)` ends the object as `cancel()` does, `read(n)` only where that was the last."""
    return all(
        isinstance(node, ast.If)
        and not node.orelse
        and (isinstance(node.body[-1], ast.Raise) or _was_done_before(method, node))
        for node in method.statements
        if isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.AsyncFor)
    )


def _was_done_before(method: Function, asked: ast.If) -> bool:
    """`if self.closed: return`, and further on `self.closed = True`."""
    flag = own_attribute(asked.test, method.owner or "")
    set_up = (
        own_attribute(target, method.owner or "") == flag
        and isinstance(value, ast.Constant)
        and value.value is True
        for target, value in assignments(method)
    )
    return flag is not None and isinstance(asked.body[-1], ast.Return) and any(set_up)


def _speaks(method: Function) -> bool:
    """It calls something of a field of its own: the pool that it came from."""
    own = method.owner
    for call in method.calls:
        match call.func:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name))) if name == own:
                return True
    return False


def _returned(method: Function) -> Iterator[ast.expr]:
    """What it returns; of a name, what the name was given."""
    for node in method.statements:
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
            yield node.value
            yield from (way for value in given_to(method, node.value.id) for way in ways(value))
        elif isinstance(node, ast.Return) and node.value is not None:
            yield from ways(node.value)


def _class_of(model: ClassModel, pool: Class | None, method: Function, value: ast.expr) -> Class | None:
    found = model.type_of(method, value)
    if isinstance(found, Class):
        return found
    inner = value.value if isinstance(value, ast.Await) else value
    match inner:
        case ast.Call(func=ast.Name(id=name)) if name == method.owner and "classmethod" in method.decorators:
            return pool
        case ast.Call(func=ast.Attribute(value=ast.Attribute() as table, attr=taking)) if (
            pool is not None and taking in REMOVERS
        ):
            attribute = own_attribute(table, method.owner or "")
            found = element_class(model, pool, attribute) if attribute is not None else None
            return found if found is not None and any(endings_of(found)) else None
    return None


def stored_class(model: ClassModel, pool: Class, method: Function) -> Class | None:
    """Of what a method takes out of the pool's lists, where all of that is of one class."""
    found = {element_class(model, pool, name) for name, _ in field_work(method).taken}
    cls = found.pop() if len(found) == 1 else None
    return cls if cls is not None and "__del__" not in cls.methods else None


def _copied(value: ast.expr, own: str) -> str | None:
    """`all` of `list(self.all)`"""
    match value:
        case ast.Call(func=func, args=[inner]) if last_part(func) in AROUND:
            return own_attribute(inner, own)
    return None


def element_class(model: ClassModel, pool: Class, attribute: str, seen: tuple[str, ...] = ()) -> Class | None:
    """What the pool's own code puts into one of its lists: `self.ready = list(self.all)` what is in that."""
    for each in pool.methods.values():
        own = each.owner or ""
        for node in each.statements:
            made: list[ast.expr] = []
            match node:
                case (
                    ast.Assign(targets=[target], value=value)
                    | ast.AnnAssign(target=target, value=ast.expr() as value)
                ) if own_attribute(target, own) == attribute:
                    made = [inner for inner in walk(value) if isinstance(inner, ast.Call)]
                    other = _copied(value, own)
                    if other is not None and other not in (attribute, *seen):
                        return element_class(model, pool, other, (attribute, *seen))
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(value=table, attr=way), args=[*_, given])
                ) if way in FILLING and own_attribute(table, own) == attribute:
                    made = [given]
            for call in made:
                found = model.type_of(each, call)
                if isinstance(found, Class):
                    return found
    return None
