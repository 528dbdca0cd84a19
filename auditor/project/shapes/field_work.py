"""What a method does to the fields of its own object: takes out, puts in, records, counts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from itertools import chain

from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Function
from auditor.project.shapes.counting_up import counts_by_itself, raised_by
from auditor.project.shapes.found_in import found_in
from auditor.project.shapes.marked_by_helpers import marked_by_helper
from auditor.project.shapes.markings import Marking, marked_by
from auditor.project.shapes.name_bindings import FILLING, Binding, bindings, bound_by, mentions
from auditor.project.shapes.owners import owners_of, shared_by
from auditor.project.shapes.pieces import gone_over, is_end_of, joins, leaves_a_rest, left_out
from auditor.project.shapes.pool_state import REMOVERS, is_queue, own_parameters
from auditor.source.nodes import children, walk

TAKING = REMOVERS - {"remove", "discard"}
SORTED = frozenset({"heappop", "heappush", "insort", "insort_left", "insort_right"})
SHORT = 3  # statements of a method that only shows a part of a field
LOOKING_UP = frozenset({"get", "setdefault", "values", "items"})


@dataclass(frozen=True, slots=True)
class Put:
    """`value` goes into `field`, under `key` if there is one."""

    field: str
    key: ast.expr | None
    value: ast.expr

    @property
    def thing(self) -> ast.expr:
        """Of `self.free[page] = None`, which makes a mapping an ordered set, the key."""
        is_set = isinstance(self.value, ast.Constant) and self.value.value is None
        return self.key if is_set and self.key is not None else self.value


@dataclass(slots=True)
class FieldWork:
    """Everything in the order of the text. `taken` are fields with the expression that takes, `removed`
    fields with what is named to go, `added_under` fields with the key under which something is added,
    `counted` fields with 1 or -1, `summed` those that change by more, as `amounts` say. `counters` are fields
    that count by themselves."""

    method: Function
    told: frozenset[str]
    taken: list[tuple[str, ast.expr]] = field(default_factory=list)
    put: list[Put] = field(default_factory=list)
    removed: list[tuple[str, ast.expr]] = field(default_factory=list)
    added_under: list[tuple[str, ast.expr]] = field(default_factory=list)
    counted: list[tuple[str, int]] = field(default_factory=list)
    summed: set[str] = field(default_factory=set)
    amounts: list[tuple[str, int, ast.expr]] = field(default_factory=list)
    balances: list[tuple[str, int, ast.expr, ast.expr]] = field(default_factory=list)
    marked: list[Marking] = field(default_factory=list)
    counters: set[str] = field(default_factory=set)
    returned: list[ast.expr] = field(default_factory=list)
    ways_changed: dict[str, set[type[ast.operator]]] | None = None
    """Up or down, or both: how it changes each number, once `use_counts` has asked."""
    _bindings: list[Binding] | None = None
    _from_told: Set[str] | None = None

    @property
    def from_told(self) -> Set[str]:
        """Names of what it is told, and of what comes from that."""
        if self._from_told is None:
            self._from_told = self.derived(self.told, frozenset())
        return self._from_told

    def is_from_told(self, value: ast.expr) -> bool:
        """Whether this has to do with what the method is told."""
        return mentions(value, self.from_told, frozenset())

    @property
    def met_by_told(self) -> Set[str]:
        """With names of loops that look for it: `for i, each in enumerate(self.all): if each is buffer:`."""
        looking = (node for node in self.method.statements if isinstance(node, ast.For))
        met = {name for loop in looking for name in bound_by(loop.target) if self._is_compared(loop)}
        return self.derived(self.from_told | met, frozenset()) if met else self.from_told

    def _is_compared(self, loop: ast.For) -> bool:
        return any(
            len({self.is_from_told(side) for side in (test.left, *test.comparators)}) == 2
            and any(isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) for op in test.ops)
            and mentions(test, set(bound_by(loop.target)), frozenset())
            for node in walk(loop)
            if isinstance(node, ast.If)
            for test in walk(node.test)
            if isinstance(test, ast.Compare)
        )

    def hands_out(self, taken: Set[int]) -> bool:
        """Whether a return mentions one of these expressions, or what comes from them."""
        derived = self.derived(frozenset(), taken)
        return any(mentions(value, derived, taken) for value in self.returned)

    def derived(self, names: Set[str], marked: Set[int]) -> Set[str]:
        """Local names that are given, or go over, something that has to do with these."""
        found = set(names)
        before = -1
        while before != len(found):
            before = len(found)
            for made in self.bindings:
                if not made.bound <= found and made.mentions(found, marked):
                    found |= made.bound
        return found

    def of_one_kind(self, names: Set[str]) -> Set[str]:
        """With those bound by the same statements, and those they are made of: of `place, buffer` both, of
        `bit = 1 << place` the place."""
        bound = [made for made in self.bindings if not made.bound.isdisjoint(names)]
        return set(names).union(*(made.bound | made.names for made in bound)) - {self.method.owner}

    @property
    def bindings(self) -> list[Binding]:
        if self._bindings is None:
            statements = self.method.statements
            self._bindings = [made for node in statements for made in bindings(node)]
        return self._bindings


def field_work(method: Function) -> FieldWork:
    """Read off the body once."""
    if method.field_work is None:
        method.field_work = _read(method)
    return method.field_work


def _read(method: Function) -> FieldWork:
    work = FieldWork(method, frozenset(own_parameters(method)))
    of_module = shared_by(method)
    if not (owners_of(method) or of_module) or isinstance(method.node, (ast.Module, ast.Lambda)):
        return work
    work.counters.update(name for name, value in of_module.items() if counts_by_itself(value))
    reader = _Reader(work, of_module.keys() - work.told)
    for node in method.statements:
        reader.read(node)
    return work


class _Reader:
    """Follows `spare = self._bins.get(size)` so that `spare.pop()` takes out of `_bins`; what a module has
    is what its functions have in common."""

    def __init__(self, work: FieldWork, of_module: Set[str] = frozenset()) -> None:
        self.owners = owners_of(work.method)
        self.of_module = of_module
        self.work = work
        self.aliases: dict[str, str] = {name: name for name in of_module}
        self.loops: dict[str, ast.expr] = {}

    def read(self, statement: ast.stmt) -> None:
        for bound, given in assigned_by(statement):
            self._assigned(bound, given)
        match statement:
            case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as op, value=value) if isinstance(
                target, ast.Attribute | ast.Subscript
            ) or (isinstance(target, ast.Name) and target.id in self.of_module):
                self._changed(target, op, value)
            case ast.AugAssign(target=target, op=ast.BitOr(), value=value):
                if (name := self.field_of(target)) is not None and self._is_a_set(name):
                    self.work.put.append(Put(name, None, value))
            case ast.Delete(targets=[ast.Subscript(value=container, slice=key)]):
                if (name := self.field_of(container)) is not None:
                    self.work.removed.append((name, key))
                    self._taken_in_loop(name)
            case ast.For(target=each, iter=over):
                if (name := self.field_of(gone_over(over))) is not None:
                    self.loops[name] = over
                self._gone_over(each, over)
            case ast.Return(value=ast.expr() as value):
                self.work.returned.append(value)
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Delete):
            self._marked(statement)
        for node in _own_expressions(statement):
            if isinstance(node, ast.Call):
                self._called(node)
                self._marked(node)
                self.work.marked += marked_by_helper(self.work.method, node)
            elif (
                isinstance(node, ast.Subscript)
                and is_end_of(node)
                and (name := self.field_of(node.value)) is not None
            ):
                self.work.taken.append((name, node))

    def _gone_over(self, each: ast.expr, over: ast.expr) -> None:
        """`for pile in self.piles.values():`, `for size, pile in sorted(self.piles.items()):`"""
        match gone_over(over), each:
            case (ast.Call(func=ast.Attribute(value=table, attr="values"), args=[]), ast.Name(id=pile)) | (
                ast.Call(func=ast.Attribute(value=table, attr="items"), args=[]),
                ast.Tuple(elts=[_, ast.Name(id=pile)]),
            ):
                if (name := self.field_of(table)) is not None:
                    self.aliases[pile] = name

    def _taken_in_loop(self, name: str) -> None:
        """`del self.idle[at]` under `for at, page in enumerate(self.idle):`; a part by `= (at + n, rest)`."""
        if name in self.loops:
            self.work.taken.append((name, self.loops[name]))

    def _marked(self, node: ast.AST) -> None:
        for mark in marked_by(node):
            if (name := self.field_of(mark.container)) is not None:
                self.work.marked.append(mark.of(name))

    def field_of(self, node: ast.expr) -> str | None:
        """The field at the root of `self.bins[size]`, `self.bins.get(size)` or a local name of it."""
        while True:
            match node:
                case (
                    ast.Attribute(value=ast.Name(id=owner), attr=attr)
                    | ast.Subscript(value=ast.Name(id=owner), slice=ast.Constant(value=str() as attr))
                ) if owner in self.owners:
                    return attr
                case ast.Name(id=owner) if owner == self.work.method.owner and self.work.method.of_first:
                    return owner  # what it is told is the list itself
                case ast.Subscript(value=inner) | ast.Attribute(value=ast.Subscript() as inner):
                    node = inner  # `self.shards[key].free` is one of theirs
                case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in LOOKING_UP:
                    node = inner
                case ast.Call(
                    func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str() as attr), *_]
                ):
                    node = ast.Attribute(inner, attr)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=each), attr=attr)) if each in self.owners:
                    return self._shown_by(attr)
                case ast.Call(func=ast.Name(id=attr)) if self.work.method.cls is None:
                    return self._shown_by(attr)
                case ast.Name(id=name):
                    return self.aliases.get(name)
                case _:
                    return None

    def _shown_by(self, name: str) -> str | None:
        """What another method, or function, does nothing but look into: `self._shelf(size)`."""
        cls, module = self.work.method.cls, self.work.method.module
        helper = (cls.methods if cls is not None else module.functions).get(name)
        body = helper.node.body if helper is not None and helper is not self.work.method else None
        match body:
            case [*_, ast.Return(value=ast.Subscript() | ast.Call() | ast.Attribute() as shown)] if (
                helper is not None and len(body) <= SHORT
            ):
                stores = self.of_module if cls is None else frozenset()
                return _Reader(FieldWork(helper, frozenset()), stores).field_of(shown)
        return None

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        name = self.field_of(value)
        if isinstance(target, ast.Attribute) and counts_by_itself(value):
            self.work.counters.add(target.attr)
        if isinstance(target, ast.Attribute) and (more := raised_by(target, value)) is not None:
            self._changed(target, ast.Add(), more)
        elif isinstance(target, ast.Attribute) and (gone := left_out(value, target)) is not None:
            if self.field_of(target) is not None:
                self._struck(target.attr, gone)
        elif isinstance(target, ast.Attribute) and joins(value, target):
            self.work.put.append(Put(target.attr, None, value))
        if isinstance(target, ast.Name) and name is not None and not isinstance(value, ast.Name):
            self.aliases[target.id] = name
        elif isinstance(target, ast.Subscript) and (into := self.field_of(target.value)) is not None:
            self.work.put.append(Put(into, target.slice, value))
            if leaves_a_rest(value):
                self._taken_in_loop(into)

    def _changed(self, target: ast.expr, op: ast.operator, value: ast.expr) -> None:
        name = self.field_of(target)
        way = 1 if isinstance(op, ast.Add) else -1
        if name is not None and isinstance(target, ast.Subscript):
            self.work.balances.append((name, way, target.slice, value))
        if name is None or isinstance(target, ast.Subscript):
            return
        if isinstance(value, (ast.List, ast.Tuple, ast.Name)) and way > 0:
            self.work.put.append(Put(name, None, value))
        if way < 0 and self._is_a_set(name):
            self._struck(name, value)
            return
        self.work.counted.append((name, way))
        if not (isinstance(value, ast.Constant) and value.value == 1):
            self.work.summed.add(name)
            self.work.amounts.append((name, way, value))

    def _called(self, call: ast.Call) -> None:
        match call:
            case ast.Call(
                func=ast.Attribute(attr=way) | ast.Name(id=way),
                args=[heap, *given],
            ) if way in SORTED:
                name = self.field_of(heap)
                if name is not None and given:
                    self.work.put.append(Put(name, None, given[0]))
                elif name is not None:
                    self.work.taken.append((name, call))
            case ast.Call(func=ast.Attribute(value=container, attr=way), args=args):
                name = self.field_of(container)
                if name is None:
                    return
                looked_up = way == "get" and args and not is_queue(self.work.method, container)
                if way in TAKING and not looked_up:
                    self.work.taken.append((name, call))
                if way in FILLING and (key := _key_within(container)) is not None:
                    self.work.added_under.append((name, key))
                if way in FILLING and args:
                    self.work.put.append(Put(name, None, args[-1]))
                if way in ("remove", "discard", "pop", "difference_update") and args:
                    self._struck(name, args[0])

    def _struck(self, name: str, thing: ast.expr) -> None:
        """`self.idle.remove(page)`, `self.idle -= pages`"""
        self.work.removed.append((name, thing))
        self._taken_in_loop(name)
        of_field = found_in(self.work, thing, lambda node: self.field_of(node) == name)
        self.work.taken += [(name, value) for value in of_field]

    def _is_a_set(self, name: str) -> bool:
        """`self.idle = set(range(n))`, or `= {...}`, in its class: `-=` strikes off, and counts nothing."""
        cls = self.work.method.cls
        return cls is not None and re.search(rf"\.{name}(?:: [^=\n]+)? = (?:set\(|\{{)", cls.text) is not None


def _key_within(container: ast.expr) -> ast.expr | None:
    """`request` of `self.held[request]` and of `self.held.setdefault(request, [])`."""
    match container:
        case ast.Subscript(slice=key) | ast.Call(func=ast.Attribute(attr="setdefault"), args=[key, *_]):
            return key
    return None


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Expressions of this statement; those of statements within it come with those."""
    below = children(statement)
    within = (child.context_expr if isinstance(child, ast.withitem) else child for child in below)
    return chain.from_iterable(walk(each) for each in within if isinstance(each, ast.expr))
