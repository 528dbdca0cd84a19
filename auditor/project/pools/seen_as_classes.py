"""Pools without a class, seen as one: a module whose functions share what it has, and functions that are told
the object first on which they work.

    _idle: list[Event] = []                          @dataclass
                                                     class Ring:
    def lend():                                          free: list[int]
        return _idle.pop() if _idle else None
                                                     def draw(ring: Ring):
    def hand_in(event):                                  return ring.free.pop()
        _idle.append(event)

What is asked of classes can be asked of these then. Nothing but the text ties such functions together, so
that the users of what is found have to say whether it is a pool.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from auditor.flow.effects import Handle
from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.shared_state import Shared, is_store, name_of, sharing
from auditor.project.code.told_object import methods_of_object, told_the_same
from auditor.project.pools.by_belief import ENDING as TAKING_BACK
from auditor.project.pools.halves import Half, Pair
from auditor.project.shapes.full_at_first import BEGINNING
from auditor.project.shapes.pool_state import own_parameters

NAMED_STATE = re.compile(r"""\.\w+ = (?:["']|[A-Z])|\] = -1(?!\d)""")
"""`slot.state = "idle"`, `slot.state = State.IDLE`, `owner[slot] = -1`"""


@dataclass(frozen=True, slots=True)
class SeenAsClass:
    """The class, and which function each of its methods is; `of_first` where that is told the object,
    `closed` where they are the functions of another one."""

    cls: Class
    functions: Mapping[Function, Function]
    of_first: bool
    closed: bool = False

    def as_functions(self, pair: Pair) -> Pair | None:
        """The pair with the functions themselves for halves, for their users to say whether it is one; None
        where it is one of methods."""
        if not all(half.function in self.functions for half in pair.acquires):
            return None
        acquires, releases = (tuple(map(self._as_function, side)) for side in (pair.acquires, pair.releases))
        sure = self.closed and not pair.proposed  # nobody else gets at what a closure has
        return replace(pair, owner=None, acquires=acquires, releases=releases, proposed=not sure)

    def _as_function(self, half: Half) -> Half:
        function = self.functions.get(half.function)
        if function is None:
            return half
        if half.handle is Handle.RECEIVER:
            handle = Handle.ARGUMENT if self.of_first else Handle.NONE
            return replace(half, function=function, handle=handle, argument=0)
        told, argument = own_parameters(half.function), half.argument
        if self.of_first and isinstance(argument, int) and argument < len(told):
            argument = told[argument]  # it is told the object before that
        return replace(half, function=function, argument=argument)


def seen_as_classes(module: Module, plain: Sequence[Function]) -> Iterator[SeenAsClass]:
    """Of the plain functions of a module, where one of them takes something out or sets something back."""
    if len(plain) < 2 or not any(map(_takes_back, plain)):
        return
    kept = {
        name
        for name, value in module.assigned.items()
        if is_store(value) and sum(name in each.text for each in plain) > 1
    }
    if kept:
        yield _of_module(module, plain, kept)
    for said, functions in told_the_same(module, plain):
        if any(map(_takes_back, functions)):
            yield _as_class(methods_of_object(module, said, functions), of_first=True)


def _takes_back(function: Function) -> bool:
    return (TAKING_BACK.search(function.text) or NAMED_STATE.search(function.text)) is not None


# What a module has ------------------------------------------------------------------------------------------


def _of_module(module: Module, plain: Sequence[Function], kept: Set[str]) -> SeenAsClass:
    beginning = [each for each in plain if BEGINNING.match(each.name)]
    return _as_class(sharing(module, name_of(module), module.tree.body, plain, kept, beginning))


def seen_in(factory: Function, handed: Sequence[Function]) -> SeenAsClass | None:
    """The functions that one function makes and hands out together: what it has they have in common."""
    body = factory.node.body if isinstance(factory.node, ast.FunctionDef) else []
    kept = {
        target.id
        for statement in body
        for target, value in assigned_by(statement)
        if isinstance(target, ast.Name) and is_store(value)
    }
    if not kept or not any(map(_takes_back, handed)):
        return None
    beginning = [each for each in handed if BEGINNING.match(each.name)]
    return _as_class(sharing(factory.module, factory.name, body, handed, kept, beginning), closed=True)


def _as_class(shared: Shared, *, of_first: bool = False, closed: bool = False) -> SeenAsClass:
    functions = {method: function for function, method in shared.methods.items()}
    return SeenAsClass(shared.cls, functions, of_first=of_first, closed=closed)
